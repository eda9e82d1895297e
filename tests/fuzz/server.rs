//! A server without a socket around a model that ends each answer at once, for bodies of requests.

use std::path::Path;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::http::Request;
use llmctl_base::{Error, GivenSampling};
use llmctl_engine::session::store::ModelFingerprint;
use llmctl_engine::{ChatTokenizer, Engine, EngineClient, EngineConfig};
use llmctl_hub::ModelSource;
use llmctl_models::kv::{KvGroup, KvKind, PageRef};
use llmctl_models::load::TextsAlone;
use llmctl_models::model::{Batch, Logits, Model, ModelSpec};
use llmctl_models::tensor::SharedBytes;
use llmctl_serve::engines::engine::EngineSlot;
use llmctl_serve::telemetry::observe::Observer;
use llmctl_serve::{App, ServeSettings, ServedModel, api};
use tokio::runtime::Runtime;
use tower::ServiceExt;

/// Longest time for an answer.
const PATIENCE: Duration = Duration::from_secs(60);
const PAGE_BYTES: usize = 64;
const TEMPLATE: &str =
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{{ tools | tojson if tools }}";

pub struct Server {
    runtime: Runtime,
    router: Router,
}

impl Server {
    pub fn start() -> Self {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let folders = ["tests/parity/llama", "../tests/parity/llama"].map(|folder| here.join(folder));
        let folder = folders.into_iter().find(|folder| folder.is_dir()).expect("the parity checkpoints");
        let texts = TextsAlone::open(&ModelSource::Folder(folder)).expect("texts").texts;
        let (tokenizer, ends) = (texts.tokenizer.clone(), texts.end_of_generation.clone());
        let spec = ModelSpec {
            architecture: "mute".to_owned(),
            vocab_size: tokenizer.vocab_size(),
            context_length: 256,
            groups: vec![KvGroup { kind: KvKind::Full, page_bytes: PAGE_BYTES }],
            adapters: Vec::new(),
            can_rewind: true,
        };
        let model = Mute { spec, end: ends[0] };
        let config = EngineConfig::new(model.spec.context_length, ends);
        let engine = EngineClient::spawn(move || Engine::new(Box::new(model), tokenizer, config));
        let model = ServedModel {
            id: "m".to_owned(),
            created: 1,
            chat_tokenizer: ChatTokenizer::new(texts, Some(TEMPLATE)),
            fingerprint: ModelFingerprint {
                name: "m".to_owned(),
                fingerprint: "f".to_owned(),
                reference: None,
            },
            defaults: GivenSampling::GREEDY,
            facts: None,
        };
        let slot = EngineSlot::new(engine.expect("an engine"));
        let app = App::new(model, slot, None, Observer::default(), ServeSettings::default());
        let router = api::routes_of(&app).with_state(app);
        Self { runtime: Runtime::new().expect("threads"), router }
    }

    /// Returns status and body of an answer.
    pub fn post(&self, path: &str, body: &[u8]) -> (u16, String) {
        let body = Body::from(Bytes::copy_from_slice(body));
        let request =
            Request::post(path).header("content-type", "application/json").body(body).expect("a request");
        let router = self.router.clone();
        self.runtime.block_on(async {
            let answered = tokio::time::timeout(PATIENCE, async {
                let (parts, body) =
                    router.oneshot(request).await.expect("a router does not fail").into_parts();
                let bytes = to_bytes(body, usize::MAX).await.expect("a body");
                (parts.status.as_u16(), String::from_utf8(bytes.to_vec()).expect("UTF-8"))
            });
            answered.await.unwrap_or_else(|_| panic!("{path}: no answer in {PATIENCE:?}"))
        })
    }
}

/// A model whose next token is always the end.
struct Mute {
    spec: ModelSpec,
    end: u32,
}

impl Model for Mute {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn forward(&mut self, batch: &Batch<'_>) -> Result<Logits, Error> {
        let vocab_size = self.spec.vocab_size;
        let mut row = vec![0.0; vocab_size];
        row[self.end as usize] = 20.0;
        let num_rows = batch.rows.iter().filter(|row| row.wants_logits).count();
        Ok(Logits { values: row.repeat(num_rows), vocab_size })
    }

    fn copy_page(&mut self, _: PageRef, _: PageRef) -> Result<(), Error> {
        Ok(())
    }

    fn free_page(&mut self, _: PageRef) {}

    fn export_page(&self, _: PageRef, out: &mut Vec<u8>) -> Result<(), Error> {
        out.resize(out.len() + PAGE_BYTES, 0);
        Ok(())
    }

    fn import_page(&mut self, _: PageRef, _: SharedBytes) -> Result<(), Error> {
        Ok(())
    }
}
