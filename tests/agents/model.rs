//! The scripted model: a real decoder computes and stores the KV rows of every token, and only its logits are replaced by
//! those of a script. So scheduler, pages, prefix index, disk, sessions, grammars and sampling run as with real weights.
//!
//! The double reads the conversation back through the page tables, and saves the tokens of a page with its rows: a page that is
//! lost, mixed up or restored wrongly changes the answer. Its checkpoint has one small layer, so that tens of thousands of
//! tokens take seconds, and the tokenizer and chat template of Qwen 3.

use llmctl_models::load::load;
use llmctl_models::model::Logits;
use safetensors::tensor::Dtype;

use crate::common::prelude::*;

pub const CONTEXT_TOKENS: usize = 65_536;

const HIDDEN: usize = 32;
const HEAD: usize = 16;
const FEED_FORWARD: usize = 32;
/// Rows of the embedding, a multiple of what kernels take at once; the tokenizer has fewer tokens.
const VOCAB: usize = 151_680;
const TOKEN_BYTES: usize = size_of::<u32>() * PAGE_TOKENS;

const TURN_START: &str = "<|im_start|>";
const TURN_END: &str = "<|im_end|>";
const HEADER: &str = "assistant\n";

/// Returns the answer to a prompt's text, which ends before the answer's header.
pub type Script = Arc<dyn Fn(&str) -> String + Send + Sync>;

/// Writes the checkpoint into a folder, with a vision tower if it `sees`. Returns false, with a note, without the fixtures that have
/// tokenizer and template.
pub fn write_checkpoint(folder: &Path, sees: bool) -> bool {
    let Some(fixtures) = fixtures() else { return false };
    let tokenizers = fixtures.join("tokenizers");
    for (from, to) in [
        ("assembled/qwen3/tokenizer.json", "tokenizer.json"),
        ("qwen3/tokenizer_config.json", "tokenizer_config.json"),
        ("qwen3/generation_config.json", "generation_config.json"),
    ] {
        std::fs::copy(tokenizers.join(from), folder.join(to)).expect("a file of the fixtures");
    }
    let seen = sees.then(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/qwen3-vl"));
    let config = seen.as_ref().map_or_else(config, |folder| seeing_config(folder));
    std::fs::write(folder.join("config.json"), config.to_string()).expect("a file");
    write_weights(&folder.join("model.safetensors"), seen.as_deref());
    true
}

/// The configuration with the tower of another checkpoint.
fn seeing_config(of_tower: &Path) -> Value {
    let bytes = std::fs::read(of_tower.join("config.json")).expect("a configuration");
    let mut whole: Value = serde_json::from_slice(&bytes).expect("JSON");
    let mut text = config();
    text["model_type"] = "qwen3_vl_text".into();
    text["rope_parameters"] = whole["text_config"]["rope_parameters"].clone();
    whole["text_config"] = text;
    for (name, id) in [
        ("vision_start_token_id", 151_652),
        ("vision_end_token_id", 151_653),
        ("image_token_id", 151_655),
        ("video_token_id", 151_656),
    ] {
        whole[name] = id.into();
    }
    whole
}

fn config() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": HEAD, "hidden_act": "silu", "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "rope_scaling": null, "tie_word_embeddings": true,
        "vocab_size": VOCAB, "attention_bias": false, "use_sliding_window": false, "torch_dtype": "float32",
        "bos_token_id": 151_643, "eos_token_id": 151_645,
    })
}

/// Values between -0.5 and 0.5 that look random.
fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|_| next()).collect()
}

/// Writes weights of noise, with the tower of another checkpoint.
fn write_weights(path: &Path, of_tower: Option<&Path>) {
    let model = if of_tower.is_some() { "model.language_model" } else { "model" };
    let layer = |name: &str| format!("{model}.layers.0.{name}.weight");
    let shapes: Vec<(String, Vec<usize>)> = vec![
        (format!("{model}.embed_tokens.weight"), vec![VOCAB, HIDDEN]),
        (format!("{model}.norm.weight"), vec![HIDDEN]),
        (layer("input_layernorm"), vec![HIDDEN]),
        (layer("post_attention_layernorm"), vec![HIDDEN]),
        (layer("self_attn.q_norm"), vec![HEAD]),
        (layer("self_attn.k_norm"), vec![HEAD]),
        (layer("self_attn.q_proj"), vec![HEAD, HIDDEN]),
        (layer("self_attn.k_proj"), vec![HEAD, HIDDEN]),
        (layer("self_attn.v_proj"), vec![HEAD, HIDDEN]),
        (layer("self_attn.o_proj"), vec![HIDDEN, HEAD]),
        (layer("mlp.gate_proj"), vec![FEED_FORWARD, HIDDEN]),
        (layer("mlp.up_proj"), vec![FEED_FORWARD, HIDDEN]),
        (layer("mlp.down_proj"), vec![HIDDEN, FEED_FORWARD]),
    ];
    let bytes: Vec<Vec<u8>> = (1..)
        .zip(&shapes)
        .map(|(seed, (_, shape))| noise(shape.iter().product(), seed))
        .map(|values| values.iter().flat_map(|value| value.to_le_bytes()).collect())
        .collect();
    let views = shapes.into_iter().zip(&bytes).map(|((name, shape), bytes)| {
        (name, TensorView::new(Dtype::F32, shape, bytes).expect("shapes and bytes agree"))
    });
    let other = of_tower.map(|folder| std::fs::read(folder.join("model.safetensors")).expect("weights"));
    let other = other.as_ref().map(|bytes| safetensors::SafeTensors::deserialize(bytes).expect("weights"));
    let tower = other.iter().flat_map(|tensors| tensors.tensors());
    let views = views.chain(tower.filter(|(name, _)| name.starts_with("model.visual.")));
    let file = safetensors::serialize(views, None::<HashMap<String, String>>).expect("a file's bytes");
    std::fs::write(path, file).expect("a file");
}

/// Loads the checkpoint with the scripted model in place of its logits.
pub fn load_scripted(folder: &Path, script: Script) -> LoadedModel {
    let resolved = Resolved::new("scripted".to_owned(), ModelSource::Folder(folder.to_owned()));
    let options = LoadOptions { device: Device::Cpu(cpu(2)), ..LoadOptions::default() };
    let loaded = load(&resolved, &options, &mut |_, _| {}).expect("a model");
    let speaker = Speaker::new(loaded.texts.tokenizer.clone(), script);
    LoadedModel { model: Box::new(ScriptedModel::new(loaded.model, speaker)), ..loaded }
}

/// The script in tokens.
struct Speaker {
    tokenizer: Arc<Tokenizer>,
    script: Script,
    turn_start: u32,
    turn_end: u32,
}

impl Speaker {
    fn new(tokenizer: Arc<Tokenizer>, script: Script) -> Self {
        let id = |text: &str| tokenizer.token_to_id(text).expect("a token of the template");
        let (turn_start, turn_end) = (id(TURN_START), id(TURN_END));
        Self { tokenizer, script, turn_start, turn_end }
    }

    fn text(&self, ids: &[u32]) -> String {
        let bytes =
            ids.iter().flat_map(|&id| self.tokenizer.token_bytes(id).unwrap_or_default().into_owned());
        String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned()
    }

    /// Returns the token that the script has after `history`.
    fn next(&self, history: &[u32]) -> Result<u32, Error> {
        let start = history.iter().rposition(|&id| id == self.turn_start).unwrap_or(0);
        let (prompt, turn) = (self.text(&history[..start]), self.text(&history[start..]));
        let said = turn.strip_prefix(TURN_START).and_then(|turn| turn.strip_prefix(HEADER));
        let said = said.ok_or_else(|| Error::Backend(format!("an answer within {turn:?}")))?;
        let said = said.strip_prefix("<think>\n\n</think>\n\n").unwrap_or(said);
        let answer = (self.script)(&prompt);
        match answer.strip_prefix(said) {
            Some("") => Ok(self.turn_end),
            Some(rest) => Ok(self.tokenizer.encode_chat_rest(rest).expect("a text")[0]),
            None => Err(Error::Backend(format!("the answer {said:?} is not of the script {answer:?}"))),
        }
    }
}

struct ScriptedModel {
    inner: Box<dyn Model>,
    /// The decoder's, with room for the tokens of each page.
    spec: ModelSpec,
    tokens: HashMap<PageRef, [u32; PAGE_TOKENS]>,
    speaker: Speaker,
}

impl ScriptedModel {
    fn new(inner: Box<dyn Model>, speaker: Speaker) -> Self {
        let mut spec = inner.spec().clone();
        spec.groups.iter_mut().for_each(|group| group.page_bytes += TOKEN_BYTES);
        Self { inner, spec, tokens: HashMap::new(), speaker }
    }

    fn remember(&mut self, table: &PageTable, row: &Row) {
        let (page, offset) = table.slot(0, row.position);
        self.tokens.entry(PageRef { group: 0, page }).or_insert([0; PAGE_TOKENS])[offset] = row.token;
    }

    fn history(&self, table: &PageTable, len: usize) -> Vec<u32> {
        let token = |position| {
            let (page, offset) = table.slot(0, position);
            self.tokens[&PageRef { group: 0, page }][offset]
        };
        (0..len).map(token).collect()
    }
}

impl Model for ScriptedModel {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn forward(&mut self, batch: &Batch<'_>) -> Result<Logits, Error> {
        let mut logits = self.inner.forward(batch)?;
        batch.rows.iter().for_each(|row| self.remember(batch.tables[row.sequence], row));
        let wanted = batch.rows.iter().filter(|row| row.wants_logits);
        for (row, values) in wanted.zip(logits.values.chunks_exact_mut(VOCAB)) {
            let next = self.speaker.next(&self.history(batch.tables[row.sequence], row.position + 1))?;
            values.fill(-1e4);
            values[next as usize] = 0.0;
        }
        Ok(logits)
    }

    fn reuse(&mut self, logits: Logits) {
        self.inner.reuse(logits);
    }

    fn copy_page(&mut self, from: PageRef, to: PageRef) -> Result<(), Error> {
        if let Some(tokens) = self.tokens.get(&from).copied() {
            self.tokens.insert(to, tokens);
        }
        self.inner.copy_page(from, to)
    }

    fn free_page(&mut self, page_ref: PageRef) {
        self.tokens.remove(&page_ref);
        self.inner.free_page(page_ref);
    }

    fn export_page(&self, page_ref: PageRef, out: &mut Vec<u8>) -> Result<(), Error> {
        self.inner.export_page(page_ref, out)?;
        out.extend(self.tokens[&page_ref].iter().flat_map(|token| token.to_le_bytes()));
        Ok(())
    }

    fn import_page(&mut self, page_ref: PageRef, bytes: SharedBytes) -> Result<(), Error> {
        let (rows, tokens) = bytes.split_at(bytes.len() - TOKEN_BYTES);
        let mut page = [0; PAGE_TOKENS];
        for (token, bytes) in page.iter_mut().zip(tokens.chunks_exact(size_of::<u32>())) {
            *token = u32::from_le_bytes(bytes.try_into().expect("four bytes"));
        }
        self.tokens.insert(page_ref, page);
        let num_bytes = rows.len();
        self.inner.import_page(page_ref, bytes.slice(0, num_bytes))
    }
}
