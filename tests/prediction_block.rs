//! The block behind a Qwen 3.5 that predicts further tokens: its logits are those of a plain computation, and its drafts change
//! no answer. No published checkpoint is small enough; the block's weights are drawn here, behind the tiny checkpoints.

use llmctl_engine::ModelDrafter;
use llmctl_models::load::PredictionUse;
use llmctl_models::model::weights::to_f32;
use safetensors::Dtype;

use crate::cli::llmctl;
use crate::common::convert::{POST_NORM, Tensor, Written, add_ones, facts, renamed, write};
use crate::common::prelude::*;
use crate::common::telling::{Telling, Texts, ToyBlock, VOCAB, check_together, check_turns};
use crate::qwen3_5_gguf;

const HIDDEN: usize = 32;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD: usize = 16;
/// Rotated values of a head.
const ROTATED: usize = 4;
const INNER: usize = 96;
const EPS: f64 = 1e-6;

/// The block's tensors as Hugging Face's files have them, of a dense model or with experts.
fn block_tensors(has_experts: bool) -> BTreeMap<String, Tensor> {
    let mut shapes = vec![
        ("fc.weight".to_owned(), vec![HIDDEN, 2 * HIDDEN]),
        ("layers.0.self_attn.q_proj.weight".to_owned(), vec![2 * HEADS * HEAD, HIDDEN]),
        ("layers.0.self_attn.k_proj.weight".to_owned(), vec![KV_HEADS * HEAD, HIDDEN]),
        ("layers.0.self_attn.v_proj.weight".to_owned(), vec![KV_HEADS * HEAD, HIDDEN]),
        ("layers.0.self_attn.o_proj.weight".to_owned(), vec![HIDDEN, HEADS * HEAD]),
        ("layers.0.self_attn.q_norm.weight".to_owned(), vec![HEAD]),
        ("layers.0.self_attn.k_norm.weight".to_owned(), vec![HEAD]),
    ];
    let norms = ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"].map(str::to_owned);
    let layer_norms = ["input_layernorm", "post_attention_layernorm"].map(|norm| format!("layers.0.{norm}"));
    shapes.extend(norms.into_iter().chain(layer_norms).map(|norm| (format!("{norm}.weight"), vec![HIDDEN])));
    let mut mlp = |module: String, inner: usize| {
        let parts = [("gate", [inner, HIDDEN]), ("up", [inner, HIDDEN]), ("down", [HIDDEN, inner])];
        shapes.extend(parts.map(|(part, shape)| (format!("{module}.{part}_proj.weight"), shape.to_vec())));
    };
    match has_experts {
        false => mlp("layers.0.mlp".to_owned(), INNER),
        true => {
            (0..8).for_each(|expert| mlp(format!("layers.0.mlp.experts.{expert}"), 32));
            mlp("layers.0.mlp.shared_expert".to_owned(), 32);
            shapes.push(("layers.0.mlp.gate.weight".to_owned(), vec![8, HIDDEN]));
            shapes.push(("layers.0.mlp.shared_expert_gate.weight".to_owned(), vec![1, HIDDEN]));
        }
    }
    let mut state = 7u64;
    let mut draw = |scale: f32| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
    };
    let drawn = |(name, shape): (String, Vec<usize>)| {
        let scale = if shape.len() == 1 { 0.3 } else { 1.7 / (shape[1] as f32).sqrt() };
        let values = (0..shape.iter().product()).map(|_| draw(scale)).collect();
        (name, (shape, values))
    };
    shapes.into_iter().map(drawn).collect()
}

/// A copy of the checkpoint `name` with the block.
fn folder_with_block(name: &str) -> TempDir {
    let (from, into) = (parity_folder().join(name), tempfile::tempdir().expect("tempdir"));
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::write(into.path().join(file), std::fs::read(from.join(file)).expect(file)).expect("a copy");
    }
    let config = std::fs::read_to_string(from.join("config.json")).expect("config.json");
    let config = config.replacen('{', "{ \"mtp_num_hidden_layers\": 1,", 1);
    std::fs::write(into.path().join("config.json"), config).expect("written");
    let file = Safetensors::open(&from).expect("opens");
    let stored = file.names().into_iter().map(|name| {
        let tensor = file.tensor(&name).expect("reads").expect("is there");
        (name.to_string(), (tensor.shape.clone(), to_f32(&tensor)))
    });
    let block = block_tensors(name.ends_with("moe"));
    let block = block.into_iter().map(|(name, tensor)| (format!("mtp.{name}"), tensor));
    let tensors: BTreeMap<String, Tensor> = stored.chain(block).collect();
    let bytes: BTreeMap<&String, Vec<u8>> = tensors
        .iter()
        .map(|(name, (_, values))| (name, values.iter().flat_map(|value| value.to_le_bytes()).collect()))
        .collect();
    let view = |(name, (shape, _)): (&String, &Tensor)| {
        (name.clone(), TensorView::new(Dtype::F32, shape.clone(), &bytes[name]).expect("as many bytes"))
    };
    let views: Vec<_> = tensors.iter().map(view).collect();
    safetensors::serialize_to_file(views, None, &into.path().join("model.safetensors")).expect("written");
    into
}

/// The dense checkpoint with the block as llama.cpp's converter writes it.
fn gguf_with_block() -> Written {
    let mut tensors = qwen3_5_gguf::tensors(&parity_folder().join("qwen3.5"), false);
    tensors.retain(|(name, _)| !name.contains("nextn"));
    let place = |(name, tensor): (String, Tensor)| {
        (format!("layers.4.{}", name.trim_start_matches("layers.0.")), tensor)
    };
    let mut block = block_tensors(false).into_iter().map(place).collect();
    add_ones(&mut block);
    let pre_norm = |norm: &str| format!("layers.4.pre_fc_norm_{norm}.weight");
    for norm in ["embedding", "hidden"] {
        block.get_mut(&pre_norm(norm)).expect("a norm").1.iter_mut().for_each(|value| *value += 1.0);
    }
    let names = [POST_NORM[0], ("norm", "nextn.shared_head_norm")];
    tensors.extend(renamed(block, &names, qwen3_5_gguf::converted));
    write(facts("qwen3.5", &[]), &tensors)
}

fn asking(prediction: PredictionUse) -> LoadOptions {
    LoadOptions { prediction, ..exact() }
}

/// A matrix `[out, in]` times a vector.
fn times((shape, values): &Tensor, x: &[f64]) -> Vec<f64> {
    let row = |row: &[f32]| row.iter().zip(x).map(|(a, b)| f64::from(*a) * b).sum();
    values.chunks(shape[1]).map(row).collect()
}

/// A norm whose weights are stored without their 1.
fn normed((_, weights): &Tensor, x: &[f64]) -> Vec<f64> {
    let mean = x.iter().map(|value| value * value).sum::<f64>() / x.len() as f64;
    x.iter().zip(weights).map(|(x, w)| x / (mean + EPS).sqrt() * (1.0 + f64::from(*w))).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Rotates the first values of a head by the angles of a position.
fn rotated(mut head: Vec<f64>, position: usize) -> Vec<f64> {
    for pair in 0..ROTATED / 2 {
        let angle = position as f64 / 10_000f64.powf(2.0 * pair as f64 / ROTATED as f64);
        let (a, b) = (head[pair], head[pair + ROTATED / 2]);
        head[pair] = a * angle.cos() - b * angle.sin();
        head[pair + ROTATED / 2] = b * angle.cos() + a * angle.sin();
    }
    head
}

/// The block, row by row, in the plainest way.
struct Reference {
    block: BTreeMap<String, Tensor>,
    embedding: Tensor,
    head: Tensor,
    /// Keys and values of the rows so far, by head.
    kv: Vec<[Vec<Vec<f64>>; 2]>,
}

impl Reference {
    fn new(folder: &Path) -> Self {
        let file = Safetensors::open(folder).expect("opens");
        let tensor = |name: &str| {
            let tensor = file.tensor(name).expect("reads").expect("is there");
            (tensor.shape.clone(), to_f32(&tensor))
        };
        Self {
            block: block_tensors(false),
            embedding: tensor("model.embed_tokens.weight"),
            head: tensor("lm_head.weight"),
            kv: Vec::new(),
        }
    }

    fn tensor(&self, name: &str) -> &Tensor {
        &self.block[&format!("{name}.weight")]
    }

    fn layer(&self, name: &str) -> &Tensor {
        self.tensor(&format!("layers.0.{name}"))
    }

    fn heads(&self, projection: &str, norm: &str, x: &[f64]) -> Vec<Vec<f64>> {
        let position = self.kv.len();
        let all = times(self.layer(&format!("self_attn.{projection}")), x);
        // A head's query is followed by its gate.
        let step = if projection == "q_proj" { 2 * HEAD } else { HEAD };
        let head = |head: &[f64]| rotated(normed(self.layer(norm), &head[..HEAD]), position);
        all.chunks(step).map(head).collect()
    }

    fn attention(&mut self, x: &[f64]) -> Vec<f64> {
        let queries = self.heads("q_proj", "self_attn.q_norm", x);
        let keys = self.heads("k_proj", "self_attn.k_norm", x);
        let values = times(self.layer("self_attn.v_proj"), x);
        self.kv.push([keys, values.chunks(HEAD).map(<[f64]>::to_vec).collect()]);
        let gates = times(self.layer("self_attn.q_proj"), x);
        let mut mixed = Vec::new();
        for (head, query) in queries.iter().enumerate() {
            let of = head / (HEADS / KV_HEADS);
            let score = |key: &Vec<f64>| {
                query.iter().zip(key).map(|(a, b)| a * b).sum::<f64>() / (HEAD as f64).sqrt()
            };
            let weights: Vec<f64> = self.kv.iter().map(|[keys, _]| score(&keys[of]).exp()).collect();
            let total: f64 = weights.iter().sum();
            for at in 0..HEAD {
                let sum: f64 = self.kv.iter().zip(&weights).map(|([_, values], w)| w * values[of][at]).sum();
                mixed.push(sum / total * sigmoid(gates[head * 2 * HEAD + HEAD + at]));
            }
        }
        times(self.layer("self_attn.o_proj"), &mixed)
    }

    /// The logits and the hidden state of the next row.
    fn row(&mut self, token: u32, hidden: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let embedding: Vec<f64> =
            self.embedding.1[token as usize * HIDDEN..][..HIDDEN].iter().map(|&x| x.into()).collect();
        let normed_embedding = normed(self.tensor("pre_fc_norm_embedding"), &embedding);
        let joined = [normed_embedding, normed(self.tensor("pre_fc_norm_hidden"), hidden)].concat();
        let mut x = times(self.tensor("fc"), &joined);
        let mixed = self.attention(&normed(self.layer("input_layernorm"), &x));
        x.iter_mut().zip(mixed).for_each(|(x, mixed)| *x += mixed);
        let inner = normed(self.layer("post_attention_layernorm"), &x);
        let gate = times(self.layer("mlp.gate_proj"), &inner);
        let up = times(self.layer("mlp.up_proj"), &inner);
        let gated: Vec<f64> = gate.iter().zip(up).map(|(gate, up)| gate * sigmoid(*gate) * up).collect();
        let fed = times(self.layer("mlp.down_proj"), &gated);
        x.iter_mut().zip(fed).for_each(|(x, fed)| *x += fed);
        let hidden = normed(self.tensor("norm"), &x);
        (times(&self.head, &hidden), hidden)
    }
}

/// Feeds a block with rows in chunks. Returns the logits of all, and the hidden state of the last one.
fn predict(
    block: &mut dyn Model,
    table: &mut PageTable,
    tokens: &[u32],
    hidden: &[f32],
    chunk: usize,
) -> (Vec<f32>, Vec<f32>) {
    let (mut logits, mut last) = (Vec::new(), Vec::new());
    for (tokens, hidden) in tokens.chunks(chunk).zip(hidden.chunks(chunk * HIDDEN)) {
        let start = table.len();
        assert!(table.extend(tokens.len()).expect("room").is_empty());
        let row = |(index, &token)| Row::known(token, start + index, 0, true);
        let rows: Vec<Row> = tokens.iter().enumerate().map(row).collect();
        logits.extend(block.predict(&Batch::new(&rows, &[table]), hidden).expect("logits").values);
        last = block.hidden()[(tokens.len() - 1) * HIDDEN..].to_vec();
    }
    (logits, last)
}

fn largest_difference(ours: &[f32], reference: &[f64]) -> f64 {
    assert_eq!(ours.len(), reference.len());
    ours.iter().zip(reference).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max)
}

/// Compares rows with the model's hidden states, then rows that go on from the block's own. Chunks may change logits by `rounding`.
fn check_logits(path: &Path, on: LoadOptions, rounding: f64) {
    let prediction = PredictionUse::IfPresent;
    let mut loaded = load_model(path, &LoadOptions { prediction, ..on }).expect("loads");
    let mut block = loaded.draft.and_then(|draft| draft.model).expect("a block");
    assert_eq!(block.hidden_width(), Some(HIDDEN));
    let prompt = golden_prompts(&parity_folder().join("qwen3.5")).pop().expect("a prompt").tokens;
    let mut reference = Reference::new(&parity_folder().join("qwen3.5"));
    let logits = Fed::new(&mut *loaded.model).feed(&prompt, usize::MAX);
    let hidden = loaded.model.hidden().to_vec();
    // What the model keeps is what its output matrix is multiplied with.
    for (row, hidden) in hidden.chunks(HIDDEN).enumerate() {
        let hidden: Vec<f64> = hidden.iter().map(|&value| value.into()).collect();
        let expected = times(&reference.head, &hidden);
        assert!(largest_difference(&logits[row * 384..(row + 1) * 384], &expected) < 1e-4, "row {row}");
    }
    let (tokens, hidden) = (&prompt[1..], &hidden[..(prompt.len() - 1) * HIDDEN]);
    let pool = page_pool(&*block, 64);
    let mut table = PageTable::new(&pool);
    let (whole, mut last) = predict(&mut *block, &mut table, tokens, hidden, usize::MAX / HIDDEN);
    let in_chunks = predict(&mut *block, &mut PageTable::new(&pool), tokens, hidden, 7);
    let exactly = |(a, b): (&f32, &f32)| f64::from(a - b).abs() <= rounding;
    assert!(
        in_chunks.0.iter().zip(&whole).all(exactly) && in_chunks.1.iter().zip(&last).all(exactly),
        "chunks"
    );
    let mut own = Vec::new();
    for (row, (token, hidden)) in tokens.iter().zip(hidden.chunks(HIDDEN)).enumerate() {
        let hidden: Vec<f64> = hidden.iter().map(|&value| value.into()).collect();
        let (expected, next) = reference.row(*token, &hidden);
        let difference = largest_difference(&whole[row * 384..(row + 1) * 384], &expected);
        assert!(difference < 1e-4, "row {row}: logits differ by {difference}");
        own = next;
    }
    for token in [5, 77, 300] {
        let (ours, next) = predict(&mut *block, &mut table, &[token], &last, 1);
        let (expected, expected_next) = reference.row(token, &own);
        assert!(largest_difference(&ours, &expected) < 1e-4, "after its own hidden states");
        (last, own) = (next, expected_next);
    }
}

#[test]
fn a_block_gives_the_logits_of_a_plain_computation_from_either_form_of_file() {
    for (on, rounding) in [(exact(), 0.0), (on_candle(), 1e-4)] {
        check_logits(folder_with_block("qwen3.5").path(), on.clone(), rounding);
        check_logits(&gguf_with_block().path, on, rounding);
    }
}

#[test]
fn a_block_needs_a_hidden_state_for_each_row_and_other_models_take_none() {
    let folder = folder_with_block("qwen3.5");
    let mut loaded = load_model(folder.path(), &asking(PredictionUse::Required)).expect("loads");
    let mut block = loaded.draft.take().and_then(|draft| draft.model).expect("a block");
    let pool = page_pool(&*block, 1);
    let mut table = PageTable::new(&pool);
    table.extend(1).expect("room");
    let rows = [Row::known(1, 0, 0, true)];
    let tables = [&table];
    let batch = Batch::new(&rows, &tables);
    assert!(block.forward(&batch).is_err());
    assert!(block.predict(&batch, &[0.0; HIDDEN - 1]).is_err());
    assert!(block.predict(&batch, &[0.0; HIDDEN]).is_ok());
    assert!(loaded.model.predict(&batch, &[0.0; HIDDEN]).is_err());
}

#[test]
fn a_block_is_loaded_only_if_it_is_asked_for_and_changes_no_fingerprint() {
    let folder = folder_with_block("qwen3.5-moe");
    let without = load_model(folder.path(), &asking(PredictionUse::Never)).expect("loads");
    assert!(without.draft.is_none() && without.model.hidden().is_empty() && without.details.is_empty());
    let with = load_model(folder.path(), &asking(PredictionUse::IfPresent)).expect("loads");
    let block = with.draft.expect("a block");
    assert_eq!(with.fingerprint, without.fingerprint);
    assert_eq!(with.model.spec(), without.model.spec());
    assert!(block.name.is_none() && block.weight_bytes > 4 * (2 * HIDDEN * HIDDEN) as u64);
    let plain = parity_folder().join("qwen3.5");
    assert!(load_model(&plain, &asking(PredictionUse::IfPresent)).expect("loads").draft.is_none());
    let error = load_model(&plain, &asking(PredictionUse::Required)).err().expect("refused").to_string();
    assert!(error.contains("cannot draft for itself: its file has none"), "{error}");
}

/// A damaged block is an error that names the tensor.
#[test]
fn a_block_with_a_tensor_missing_is_refused_by_name() {
    let mut tensors = qwen3_5_gguf::tensors(&parity_folder().join("qwen3.5"), false);
    tensors.push((
        "blk.4.nextn.eh_proj.weight".to_owned(),
        (vec![HIDDEN, 2 * HIDDEN], vec![0.0; 2 * HIDDEN * HIDDEN]),
    ));
    let file = write(facts("qwen3.5", &[]), &tensors);
    assert!(load_model(&file.path, &asking(PredictionUse::Never)).is_ok());
    let error = load_model(&file.path, &asking(PredictionUse::IfPresent)).err().expect("refused").to_string();
    assert!(error.contains("blk.4."), "{error}");
}

fn by_block(answer: &Answer) -> DraftModelUsage {
    let usage = answer.outcome().usage.draft_model.expect("a block was asked");
    assert_eq!(usage.drafter, ModelDrafter::PredictionBlock);
    usage
}

/// Two turns of a session, another that takes over its pages, and three requests at once.
#[test]
fn answers_are_the_same_with_a_blocks_drafts() {
    for name in ["qwen3.5", "qwen3.5-moe"] {
        let folder = folder_with_block(name);
        let load = || Watched::load_with_drafter(folder.path(), &asking(PredictionUse::IfPresent));
        let truths = {
            let (model, _) = load();
            let long = golden_prompts(&parity_folder().join(name)).pop().expect("a prompt").tokens;
            let ask =
                |prompt: &[u32], sampling| Request { sampling, logprobs: Some(2), ..limited(prompt, 20) };
            let first = model.cold(&ask(&long[..70], Sampling::default()));
            let next = [&long[..70], &first.ids(), &[5, 6, 7]].concat();
            let second = model.cold(&ask(&next, seeded(17)));
            [first, second, model.cold(&ask(&long[7..60], seeded(11)))]
        };
        for mode in [Speculation::Always(1), Speculation::Always(4), Speculation::Auto, Speculation::Mtp] {
            let (model, block) = load();
            let mut engine = model.engine(|config| config.speculation = mode);
            engine.set_draft_model(block.expect("a block")).expect("accepted");
            for (session, truth) in [("a", &truths[0]), ("a", &truths[1]), ("b", &truths[1])] {
                model.forget();
                let answer = run_one(&mut engine, within(session, truth.request.clone()));
                model.check(&format!("{name}: {session}, {mode:?}"), &answer, truth);
                assert_eq!(engine.inspect_session(&named(session)).expect("open").tokens, truth.fed());
                assert!(!matches!(mode, Speculation::Always(_)) || by_block(&answer).drafted_tokens > 0);
            }
            model.forget();
            let answers = run_all(&mut engine, truths.iter().map(|truth| truth.request.clone()).collect());
            for (answer, truth) in answers.iter().zip(&truths) {
                model.check(&format!("{name}: together, {mode:?}"), answer, truth);
            }
        }
    }
}

fn toy_engine(kinds: &[KvKind], config: EngineConfig) -> Engine {
    let texts = Texts::default();
    let model = Telling::new(kinds, &texts);
    let speculation = config.speculation;
    let mut engine = Engine::new(Box::new(model), ToyVocabulary::numbers(VOCAB), config).expect("valid");
    if speculation != Speculation::Off {
        let block = ToyBlock(Telling::new(&[KvKind::Full], &texts));
        engine.set_draft_model(Box::new(block)).expect("accepted");
    }
    engine
}

const KINDS: [&[KvKind]; 2] = [&[KvKind::Full], &[KvKind::Full, KvKind::Recurrent]];

/// Rows and hidden states keep in step: over chunks of a prompt, refused drafts, turns of a session, and several requests.
#[test]
fn a_blocks_drafts_follow_the_hidden_states_of_the_text() {
    KINDS.iter().for_each(|kinds| check_turns(kinds, &toy_engine, ModelDrafter::PredictionBlock));
}

#[test]
fn requests_that_run_together_are_drafted_for_together() {
    KINDS.iter().for_each(|kinds| check_together(kinds, &toy_engine, ModelDrafter::PredictionBlock, 4));
}

#[test]
fn run_uses_a_block_and_says_so() {
    let folder = folder_with_block("qwen3.5");
    let model = folder.path().to_str().expect("a path of text");
    let run = |flags: &[&str]| {
        let args = ["run", "--model", model, "--raw", "a", "--max-tokens", "24", "--stats", "-v"];
        llmctl(&[&args[..], flags].concat())
    };
    let plain = run(&["--speculate", "off"]);
    assert!(!plain.stderr.contains("prediction block"), "{plain:?}");
    for flags in [&["--speculate", "mtp"][..], &[]] {
        let ran = run(flags);
        ran.check(0, "prediction block: ").check(0, "by the prediction block ");
        assert_eq!(ran.stdout, plain.stdout);
    }
    let other = parity_folder().join("qwen3");
    let args = ["run", "--model", other.to_str().expect("a path"), "--speculate", "mtp", "--raw", "a"];
    llmctl(&args).check(2, "cannot draft for itself: its file has none");
}
