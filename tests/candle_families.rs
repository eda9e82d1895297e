//! Promise: a family without a description of ours runs through candle-transformers, and says so: same bits however its prompt is
//! cut, whoever is in the step and whatever was computed before; what it cannot do is refused by name, and so is a file that
//! it would not compute rightly.

mod checkpoints;
mod formulas;

use llmctl_base::Notice;
use llmctl_models::load::{DeviceKind, model_facts};

use crate::cli::llmctl;
use crate::common::gguf::F32;
use crate::common::prelude::*;
use crate::common::watched::bits;
use checkpoints::{Checkpoint, FAMILIES, LAYERS, RECURRENT, VOCAB, checkpoint};

/// Tokens that look like no pattern.
fn tokens(count: usize, seed: u64) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as u32 % VOCAB as u32
    };
    (0..count).map(|_| next()).collect()
}

fn load(folder: &Path) -> Box<dyn Model> {
    load_model(folder, &exact()).unwrap_or_else(|error| panic!("{}: {error}", folder.display())).model
}

#[track_caller]
fn refused(checkpoint: &Checkpoint, options: &LoadOptions) -> LoadError {
    load_model(checkpoint.write().path(), options).err().expect("refused")
}

fn with(mut checkpoint: Checkpoint, key: &str, value: Value) -> Checkpoint {
    checkpoint.config[key] = value;
    checkpoint
}

#[test]
fn every_family_loads_and_says_what_it_means() {
    for family in FAMILIES {
        let folder = checkpoint(family).write();
        let loaded = load_model(folder.path(), &exact()).unwrap_or_else(|error| panic!("{family}: {error}"));
        let said = in_words(&loaded.notices);
        for what in ["candle-transformers", "f32", "only grow", "not saved on disk"] {
            assert!(said.contains(what), "{family}: {said}");
        }
        let spec = loaded.model.spec();
        assert!(!spec.can_rewind && spec.groups.len() == 1, "{family}");
        assert_eq!(spec.groups[0].kind == KvKind::Recurrent, RECURRENT.contains(&family), "{family}");
        let facts = model_facts(&ModelSource::Folder(folder.path().into())).expect("read");
        let decoder = facts.decoder.expect("it runs");
        assert_eq!((decoder.num_layers, decoder.vocab_size), (LAYERS, VOCAB), "{family}");
        assert_eq!(decoder.kv_bytes_per_token == 0, RECURRENT.contains(&family), "{family}");
    }
}

/// The published formulas, written down once more in `formulas`, through all cuts of a prompt that crosses two chunks.
#[test]
fn phi_mamba_and_rwkv5_compute_what_their_papers_say() {
    type Formula = fn(&Checkpoint, &[u32]) -> Vec<Vec<f64>>;
    let cases: [(&str, Formula); 3] =
        [("phi", formulas::phi), ("mamba", formulas::mamba), ("rwkv5", formulas::rwkv5)];
    let tokens = tokens(75, 3);
    for (family, formula) in cases {
        let checkpoint = checkpoint(family);
        let expected: Vec<f32> = formula(&checkpoint, &tokens).concat().iter().map(|&x| x as f32).collect();
        let largest = expected.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        let mut model = load(checkpoint.write().path());
        let worst = largest_difference(&Fed::new(&mut *model).feed(&tokens, 40), &expected);
        assert!(largest > 1.0 && worst < 1e-4 * largest.max(1.0), "{family}: {worst} of {largest}");
    }
}

/// Beyond the longest run from the beginning too, which is 512 tokens.
#[test]
fn however_a_prompt_is_cut_the_bits_are_the_same() {
    for family in FAMILIES {
        let folder = checkpoint(family).write();
        let mut model = load(folder.path());
        let tokens = tokens(if family == "phi" { 560 } else { 75 }, 5);
        let whole = Fed::new(&mut *model).feed(&tokens, tokens.len());
        for chunk in [1, 7, PAGE_TOKENS, 50] {
            let cut = Fed::new(&mut *model).feed(&tokens, chunk);
            assert!(bits(&cut) == bits(&whole), "{family}: chunks of {chunk}");
        }
        // Where only the last logits are wanted, the others are not computed on the way.
        for (chunk, end) in [(1, 75), (40, 75), (75, 64), (13, 40)] {
            let last = last_logits(&mut *model, &tokens[..end], chunk);
            assert!(
                bits(&last) == bits(&whole[(end - 1) * VOCAB..end * VOCAB]),
                "{family}: {chunk} to {end}"
            );
        }
        let mut other = tokens.clone();
        other[2] = (other[2] + 1) % VOCAB as u32;
        let other = Fed::new(&mut *model).feed(&other, 50);
        // Soon after: some recurrent ones forget within a few tokens.
        let after = 7 * VOCAB..8 * VOCAB;
        assert_eq!(bits(&other[..2 * VOCAB]), bits(&whole[..2 * VOCAB]), "{family} does not look ahead");
        assert!(bits(&other[after.clone()]) != bits(&whole[after]), "{family} remembers");
    }
}

/// As the engine feeds a prompt.
fn last_logits(model: &mut dyn Model, tokens: &[u32], chunk: usize) -> Vec<f32> {
    let mut table = PageTable::new(&page_pool(&*model, 64));
    let mut values = Vec::new();
    for (index, &token) in tokens.iter().enumerate() {
        if index % chunk == 0 {
            table.extend(chunk.min(tokens.len() - index)).expect("room");
            let rows: Vec<Row> =
                rows(&tokens[index..tokens.len().min(index + chunk)], index, 0, tokens.len());
            assert_eq!(rows[0].token, token);
            values = model.forward(&Batch::new(&rows, &[&table])).expect("forward").values;
        }
    }
    values
}

/// Rows of tokens from `start` on, of which the one before position `end` wants logits.
fn rows(tokens: &[u32], start: usize, sequence: usize, end: usize) -> Vec<Row> {
    let row =
        |(index, &token): (usize, &u32)| Row::known(token, start + index, sequence, start + index + 1 == end);
    tokens.iter().enumerate().map(row).collect()
}

#[test]
fn sequences_side_by_side_do_not_bleed() {
    for family in FAMILIES {
        let folder = checkpoint(family).write();
        let mut model = load(folder.path());
        let prompts = [tokens(70, 7), tokens(70, 8)];
        let alone = prompts.each_ref().map(|prompt| last_logits(&mut *model, prompt, 70));
        let pool = page_pool(&*model, 64);
        let mut tables = [PageTable::new(&pool), PageTable::new(&pool)];
        let mut together = Vec::new();
        for start in (0..70).step_by(14) {
            let mut batch = Vec::new();
            for (sequence, prompt) in prompts.iter().enumerate() {
                tables[sequence].extend(14).expect("room");
                batch.extend(rows(&prompt[start..start + 14], start, sequence, 70));
            }
            let tables = [&tables[0], &tables[1]];
            together = model.forward(&Batch::new(&batch, &tables)).expect("forward").values;
        }
        assert_eq!(bits(&together), bits(&alone.concat()), "{family}");
    }
}

/// A page that is handed on brings nothing of its former sequence with it.
#[test]
fn a_sequence_in_used_pages_begins_anew_and_a_lost_state_is_an_error() {
    let folder = checkpoint("mamba").write();
    let mut model = load(folder.path());
    let pool = PagePool::without_index(&model.spec().groups, model.spec().groups[0].page_bytes);
    let first = tokens(20, 1);
    let mut answers = Vec::new();
    for _ in 0..2 {
        let mut table = PageTable::new(&pool);
        table.extend(20).expect("room");
        let batch = rows(&first, 0, 0, 20);
        answers.push(model.forward(&Batch::new(&batch, &[&table])).expect("forward").values);
    }
    assert_eq!(bits(&answers[0]), bits(&answers[1]));
    let mut table = PageTable::new(&pool);
    table.extend(31).expect("room");
    let lost = model.forward(&Batch::new(&rows(&[1], 30, 0, 31), &[&table]));
    assert!(matches!(lost, Err(Error::Backend(_))), "{lost:?}");
    model.free_page(PageRef { group: 0, page: 0 });
    let lost = model.forward(&Batch::new(&rows(&[1], 20, 0, 21), &[&table]));
    assert!(matches!(lost, Err(Error::Backend(_))), "{lost:?}");
}

// ---- through the engine

fn request(prompt: &[u32], seed: u64) -> Request {
    Request { sampling: seeded(seed), logprobs: Some(2), ..limited(prompt, 24) }
}

fn in_words(notices: &[Notice]) -> String {
    notices.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

fn within(session: &str, request: &Request) -> Request {
    Request { session: Some(named(session)), ..request.clone() }
}

#[track_caller]
fn check_reuse(answer: &Answer, cached: usize, reason: ReuseReason) {
    assert_eq!((answer.reuse().cached_tokens, answer.reuse().reason), (cached, reason));
    assert_eq!(answer.outcome().usage.cached_tokens, cached);
}

#[test]
fn company_and_step_size_change_no_bit_of_an_answer() {
    for family in FAMILIES {
        let folder = checkpoint(family).write();
        let watched = Watched::load(folder.path(), &exact());
        let requests = [request(&tokens(50, 11), 1), request(&tokens(90, 12), 2), request(&tokens(3, 13), 3)];
        let truths = requests.each_ref().map(|request| watched.cold(request));
        watched.forget();
        let answers = run_all(&mut watched.engine(|config| config.step_tokens = 13), requests.to_vec());
        for (answer, truth) in answers.iter().zip(&truths) {
            assert_eq!(answer.ids().len(), 24);
            watched.check(family, answer, truth);
        }
    }
}

/// Each turn is what an engine gives that computes all of it at once; and the counters say how little was computed here.
#[test]
fn sessions_grow_warm_and_begin_anew_when_they_must() {
    for family in FAMILIES {
        let folder = checkpoint(family).write();
        // Another engine over the same model would put its sequences into the same pages.
        let [watched, other] = [(), ()].map(|()| Watched::load(folder.path(), &exact()));
        let mut engine = watched.engine(|_| ());
        let first = request(&tokens(45, 21), 5);
        let truth = other.cold(&first);
        let mut turn = |request: &Request, cached: usize, reason: ReuseReason| {
            let truth = other.cold(request);
            watched.forget();
            let answer = run_one(&mut engine, within("a", request));
            check_reuse(&answer, cached, reason);
            watched.check(&format!("{family}, {reason:?}"), &answer, &truth);
        };
        turn(&first, 0, ReuseReason::New);
        let second = request(&[&truth.request.prompt[..], &truth.ids(), &[5, 6, 7]].concat(), 6);
        let held = truth.fed().len();
        turn(&second, held, ReuseReason::ExactPrefix);
        // One token more than it holds: what a step of an answer looks like.
        let truth = other.cold(&second);
        let third = request(&[&truth.request.prompt[..], &truth.ids()].concat(), 7);
        turn(&third, truth.fed().len(), ReuseReason::ExactPrefix);
        turn(&third, 0, ReuseReason::Mismatch);
        let mut edited = third.clone();
        edited.prompt[30] ^= 1;
        turn(&edited, 0, ReuseReason::Mismatch);
    }
}

#[test]
fn an_evicted_session_is_computed_again_to_the_bit() {
    for family in FAMILIES {
        let folder = checkpoint(family).write();
        let watched = Watched::load(folder.path(), &exact());
        let mut engine = watched.engine(|config| {
            config.max_running = 1;
            config.kv_memory = Some(watched.context_bytes(config));
        });
        let first = request(&tokens(60, 31), 1);
        let answer = run_one(&mut engine, within("a", &first));
        let next = request(&[&first.prompt[..], &answer.ids(), &[9]].concat(), 2);
        run_one(&mut engine, within("b", &limited(&tokens(200, 32), 56)));
        let held =
            engine.list_sessions().iter().find(|info| info.name.as_str() == "a").expect("open").num_resident;
        assert_eq!(held, 0, "{family}: its memory went to the other");
        let truth = watched.cold(&next);
        watched.forget();
        let answer = run_one(&mut engine, within("a", &next));
        check_reuse(&answer, 0, ReuseReason::Evicted);
        watched.check(family, &answer, &truth);
    }
}

#[test]
fn rewinding_forking_and_the_disk_are_refused_or_left_alone() {
    let folder = checkpoint("starcoder2").write();
    let watched = Watched::load(folder.path(), &exact());
    let disk = tempfile::tempdir().expect("tempdir");
    let mut engine = watched.engine(|_| ());
    engine.set_disk(
        DiskStore::open(DiskConfig {
            root: disk.path().to_owned(),
            limit_bytes: u64::MAX,
            fingerprint: "f".repeat(64),
            description: json!({}),
            queue_bytes: DEFAULT_QUEUE_BYTES,
            vault: None,
        })
        .expect("a store"),
    );
    run_one(&mut engine, within("a", &request(&tokens(100, 41), 1)));
    assert!(engine.flush_disk(Duration::from_secs(5)) && engine.take_notices().is_empty());
    assert_eq!(num_files_named(disk.path(), "page"), 0);
    assert!(matches!(engine.fork_session(&named("a"), &named("b")), Err(Error::NotSupported(_))));
    let session = engine.create_session().expect("room");
    engine.prefill_tokens(session, &tokens(40, 42), &Sampling::default()).expect("fits");
    assert!(matches!(engine.seek(session, 10), Err(Error::NotSupported(_))));
    assert_eq!(engine.position(session).expect("open"), 40, "a refused call changes nothing");
    engine.decode_one(session, &Sampling::default()).expect("and it goes on");
    let mut model = watched.model();
    let place = PageRef { group: 0, page: 0 };
    assert!(matches!(model.export_page(place, &mut Vec::new()), Err(Error::NotSupported(_))));
    assert!(matches!(model.import_page(place, Vec::new().into()), Err(Error::NotSupported(_))));
    assert!(matches!(model.copy_page(place, place), Err(Error::NotSupported(_))));
}

/// Files below `folder` whose path says so.
fn num_files_named(folder: &Path, part: &str) -> usize {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    entries
        .map(|path| match path.is_dir() {
            true => num_files_named(&path, part),
            false => usize::from(path.to_string_lossy().contains(part)),
        })
        .sum()
}

// ---- limits

#[test]
fn the_context_keeps_to_what_is_computed_rightly() {
    let context = |checkpoint: Checkpoint| {
        let loaded = load_model(checkpoint.write().path(), &exact()).expect("loads");
        (loaded.model.spec().context_length, in_words(&loaded.notices))
    };
    let (length, said) = context(checkpoint("starcoder2"));
    assert!(length == 900 && said.contains("900 tokens instead of 1024"), "{length}: {said}");
    assert_eq!(context(checkpoint("qwen2_moe")).0, 1024, "a window that is off");
    assert_eq!(context(with(checkpoint("qwen2_moe"), "use_sliding_window", json!(true))).0, 512);
    assert_eq!(context(with(checkpoint("falcon"), "max_position_embeddings", json!(9999))).0, 5000);
    let error = refused(&checkpoint("phi"), &LoadOptions { context: Some(1025), ..exact() });
    assert!(matches!(error, LoadError::ContextTooLong { asked: 1025, most: 1024 }), "{error}");
    let small = LoadOptions { context: Some(64), ..exact() };
    assert_eq!(
        load_model(checkpoint("phi").write().path(), &small).expect("loads").model.spec().context_length,
        64
    );
}

#[test]
fn memory_is_asked_for_before_anything_is_read() {
    for family in ["starcoder2", "phi", "rwkv6"] {
        let folder = checkpoint(family).write();
        let with = |available, context| LoadOptions { available_memory: Some(available), context, ..exact() };
        let error = load_model(folder.path(), &with(1000, Some(900))).err().expect("refused");
        let LoadError::TooBig { needed, .. } = error else { panic!("{family}: {error}") };
        assert!(load_model(folder.path(), &with(needed, Some(900))).is_ok(), "{family}");
        assert!(load_model(folder.path(), &with(needed - 1, Some(900))).is_err(), "{family}");
        if family != "rwkv6" {
            let limited = load_model(folder.path(), &with(needed - 1, None)).expect("loads");
            assert_eq!(limited.model.spec().context_length, 899, "{family}");
            let page = limited.model.spec().groups[0].page_bytes;
            // Two layers, two heads of 8 values each for keys and values, f32; twice where chunks leave a state.
            let copies = if family == "phi" { 1 } else { 2 };
            assert_eq!(page, copies * PAGE_TOKENS * LAYERS * 2 * 2 * 8 * 4, "{family}");
        }
    }
}

#[test]
fn what_would_be_ignored_is_refused() {
    let device = Device::Cpu(cpu(1));
    for (options, named) in [
        (LoadOptions { dtype: Some(Dtype::Bf16), ..exact() }, "bf16"),
        (LoadOptions { dtype: None, quantize: Some(Dtype::Q8_0), ..exact() }, "q8_0"),
        (LoadOptions { kv_type: KvType::Q8_0, ..exact() }, "KV in q8_0"),
        (LoadOptions { kv_type: KvType::Q5_1, ..exact() }, "KV in q5_1"),
    ] {
        let error = refused(&checkpoint("phi"), &options).to_string();
        assert!(error.contains("candle-transformers") && error.contains(named), "{error}");
    }
    let free = LoadOptions { dtype: None, kv_type: KvType::F16, device, ..exact() };
    assert!(load_model(checkpoint("phi").write().path(), &free).is_ok());
}

#[test]
fn a_file_that_would_be_computed_wrongly_is_refused_and_names_what_is_wrong() {
    for (family, key, value, named) in listed::<(&str, &str, Value, &str)>("candle_families", "refused") {
        let error = refused(&with(checkpoint(family), key, value.clone()), &exact()).to_string();
        assert!(error.contains(named), "{family}: {key} = {value}: {error}");
    }
}

#[test]
fn a_tensor_that_nobody_reads_is_refused_and_a_constant_is_not() {
    let mut made = checkpoint("stablelm");
    let norm = (vec![8], vec![1.0; 8]);
    made.tensors.insert("model.layers.1.self_attn.rotary_emb.inv_freq".into(), norm.clone());
    assert!(load_model(made.write().path(), &exact()).is_ok());
    made.tensors.insert("model.layers.1.self_attn.q_layernorm.weight".into(), norm);
    let error = refused(&made, &exact());
    let LoadError::Tensor { tensor, .. } = &error else { panic!("{error}") };
    assert_eq!(tensor, "model.layers.1.self_attn.q_layernorm.weight");
    let mut made = checkpoint("rwkv5");
    made.tensors.remove("rwkv.blocks.1.attention.gate.weight");
    let error = refused(&made, &exact());
    let LoadError::Tensor { tensor, .. } = &error else { panic!("{error}") };
    assert_eq!(tensor, "rwkv.blocks.1.attention.gate.weight");
}

/// `--device` means the same for candle's families as for our own.
#[test]
fn the_device_is_candles_and_its_cpu_gives_the_same_bits() {
    let folder = checkpoint("olmo").write();
    let tokens = tokens(70, 51);
    let on = |device| {
        let mut model = load_model(folder.path(), &LoadOptions { device, ..exact() }).expect("loads").model;
        last_logits(&mut *model, &tokens, 70)
    };
    let reference = on(Device::Candle(DeviceKind::Cpu));
    for (threads, threads_batch) in [(1, 1), (1, 3), (2, 2)] {
        let cpu = CpuOptions { threads, threads_batch, ..cpu(1) };
        assert_eq!(bits(&on(Device::Cpu(cpu))), bits(&reference), "{threads} and {threads_batch} threads");
    }
    let absent =
        load_model(folder.path(), &LoadOptions { device: Device::Candle(DeviceKind::Cuda(0)), ..exact() });
    assert!(cfg!(feature = "cuda") || matches!(absent, Err(LoadError::Device(_))));
}

// ---- what runs at all

#[test]
fn the_binary_runs_one_and_says_what_it_means() {
    let folder = checkpoint("stablelm").write();
    let model = folder.path().to_str().expect("UTF-8");
    let args = ["run", "--model", model, "--raw", "hello", "--max-tokens", "6", "--ctx", "64"];
    let ran = llmctl(&args);
    ran.check(0, "stablelm is not a native family of llmctl and runs through candle-transformers");
    assert!(!ran.stdout.is_empty());
    assert_eq!(llmctl(&args).stdout, ran.stdout);
    let shown = llmctl(&["models", "show", model, "--output", "json"]);
    let shown: Value = serde_json::from_str(&shown.check(0, "").stdout).expect("JSON");
    assert_eq!((&shown["runs"], &shown["context_length"]), (&json!(true), &json!(1024)));
    llmctl(&[&args[..], &["--quantize", "q8_0"]].concat()).check(65, "f32 only, not weights in q8_0");
}

#[test]
fn an_unknown_architecture_is_refused_with_all_known_ones_and_the_nearest() {
    for (asked, nearest) in
        [("falcn", "falcon"), ("rwkv7", "rwkv"), ("starcoder3", "starcoder2"), ("qwen4", "qwen")]
    {
        let error = refused(&with(checkpoint("phi"), "model_type", json!(asked)), &exact());
        let LoadError::UnknownArchitecture { name, known, nearest: found } = &error else {
            panic!("{error}")
        };
        assert_eq!(name, asked);
        for name in FAMILIES.into_iter().chain(["llama", "qwen3_5", "gpt_oss"]) {
            assert!(known.iter().any(|known| known == name), "{name} in {known:?}");
        }
        assert!(found.as_ref().is_some_and(|found| found.starts_with(nearest)), "{asked}: {found:?}");
    }
    let error = gguf("falcn");
    let LoadError::UnknownArchitecture { known, .. } = &error else { panic!("{error}") };
    assert!(
        known.iter().any(|name| name == "llama") && !known.iter().any(|name| name == "falcon"),
        "{known:?}"
    );
    let error = gguf("falcon");
    assert!(matches!(error, LoadError::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("Hugging Face folders"), "{error}");
}

fn gguf(architecture: &str) -> LoadError {
    let folder: TempDir = tempfile::tempdir().expect("tempdir");
    let path = folder.path().join("model.gguf");
    let file = GgufBuilder::new().text("general.architecture", architecture).tensor("a", &[1], F32, &[0; 4]);
    std::fs::write(&path, file.build()).expect("writable");
    load_model(&path, &exact()).err().expect("refused")
}

#[test]
fn stats_say_why_a_model_drafts_nothing() {
    let folder = checkpoint("mamba").write();
    let model = folder.path().to_str().expect("a path of text");
    let rows = tempfile::NamedTempFile::new().expect("tempfile");
    std::fs::write(rows.path(), r#"{"custom_id":"a","prompt":"a","max_tokens":4}"#).expect("writable");
    let batch = ["--batch", rows.path().to_str().expect("a path of text")];
    for asked in [&["--raw", "a", "--max-tokens", "4"][..], &["--raw", batch[0], batch[1]]] {
        for (speculate, says) in [("auto", true), ("off", false)] {
            let args = ["run", "--model", model, "--stats", "--speculate", speculate];
            let ran = llmctl(&[&args, asked].concat());
            ran.check(0, "decode       4 tokens");
            assert_eq!(ran.stderr.contains("no drafts: the model cannot drop rows"), says, "{ran:?}");
        }
    }
}
