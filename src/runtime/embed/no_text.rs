//! The engine of a model that writes no text, for a server whose model is an embedder: it has a context, and
//! refuses requests.

use std::ops::ControlFlow;

use super::EmbedTexts;
use crate::client::{EngineTransport, Sessionless, Sink};
use crate::request::{Event, Request};
use crate::spec::{EngineConfig, EngineSpec};
use llmctl_base::error::{Error, Result};
use llmctl_models::model::ModelSpec;

/// Returns an engine that generates nothing.
///
/// # Errors
/// Those of [`EngineSpec::new`].
pub fn no_engine(texts: &EmbedTexts) -> Result<impl EngineTransport + use<>> {
    let spec = &texts.spec;
    let model = ModelSpec {
        architecture: spec.architecture.to_owned(),
        vocab_size: spec.vocab_size,
        context_length: spec.context_length,
        groups: Vec::new(),
        can_rewind: true,
        adapters: Vec::new(),
    };
    let spec = EngineSpec::new(model, EngineConfig::new(spec.context_length, Vec::new()))?;
    Ok(Sessionless::new(spec, refuse))
}

fn refuse(_request: Request, mut sink: Sink) -> Result<()> {
    let refusal = Error::NotSupported("it computes embeddings and writes no text");
    let (ControlFlow::Continue(()) | ControlFlow::Break(())) = sink(Event::Failed(refusal));
    Ok(())
}
