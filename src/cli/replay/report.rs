//! The report on answers that were computed again, as text or as one JSON object.

use serde_json::{Value, json};

use super::AnswerRecord;
use super::compute::{Agreement, AnswerDivergence, Computed, FirstDifference, ReplayedToken};
use crate::cli::error::{CommandError, Exit, Kind};
use crate::cli::terminal::output::visible;
use crate::cli::terminal::report::{ReportFormat, counted, decimal, print_either};

/// What became of a recorded answer.
pub enum ReplayFinding {
    Computed(Computed),
    /// The record contradicts itself; nothing was computed.
    Broken(String),
}

/// A report on several answers.
#[derive(Default)]
pub struct ReplayReport {
    lines: Vec<String>,
    objects: Vec<Value>,
    num_same: usize,
    num_skipped: usize,
}

impl ReplayReport {
    pub fn add(&mut self, answers: &[AnswerRecord], found: Vec<ReplayFinding>) {
        for (answer, found) in answers.iter().zip(found) {
            let is_same =
                matches!(&found, ReplayFinding::Computed(computed) if computed.difference.is_none());
            self.num_same += usize::from(is_same);
            let (line, facts) = match &found {
                ReplayFinding::Broken(fault) => (fault.clone(), json!({"status": "changed", "fault": fault})),
                ReplayFinding::Computed(computed) => (line(answer, computed), object(answer, computed)),
            };
            self.lines.push(format!("{}: {line}", answer.name));
            let mut object = json!({"name": answer.name, "hash": answer.receipt.hash()});
            object.as_object_mut().into_iter().for_each(|object| {
                object.extend(facts.as_object().cloned().unwrap_or_default());
            });
            self.objects.push(object);
        }
    }

    /// Adds an answer that cannot be computed again.
    pub fn skip(&mut self, name: &str, why: &str) {
        self.num_skipped += 1;
        self.lines.push(format!("{name}: {why}"));
        self.objects.push(json!({"name": name, "status": "no_receipt"}));
    }

    /// Writes the report. The exit code is 1 if an answer differs.
    ///
    /// # Errors
    /// Those of stdout.
    pub fn print(mut self, format: ReportFormat) -> Result<Exit, CommandError> {
        let num_answers = self.lines.len() - self.num_skipped;
        let num_different = num_answers - self.num_same;
        if self.lines.len() > 1 {
            let summary = match num_different {
                0 => format!("{}: all the same", counted(num_answers, "answer")),
                _ => format!("{}: {num_different} differ", counted(num_answers, "answer")),
            };
            self.lines.push(summary);
        }
        let object = json!({"answers": self.objects, "same": self.num_same, "different": num_different});
        let printed = print_either(format, &(self.lines.join("\n") + "\n"), "llmctl.replay.v1", object)?;
        Ok(if num_different > 0 { Kind::Failure.into() } else { printed })
    }
}

fn line(answer: &AnswerRecord, computed: &Computed) -> String {
    let num_tokens = answer.receipt.answer.len();
    let tokens = counted(num_tokens, "token");
    let outcome = match &computed.difference {
        None => format!("the same {tokens}"),
        Some(FirstDifference { position, recorded, replayed }) => {
            let (recorded, replayed) = (choice(recorded), choice(replayed));
            format!("differs at position {position} of {tokens}: recorded {recorded}, now {replayed}")
        }
    };
    let Some(agreement) = &computed.agreement else { return outcome };
    let Agreement { num_tokens, num_same, divergence } = agreement;
    let percent = |count: usize| format!("{:.1}%", 100.0 * share(count, *num_tokens));
    let kl = match divergence {
        Ok(AnswerDivergence { mean_kl, num_same_top }) => {
            format!("same top token {}, KL at least {mean_kl:.6} nats", percent(*num_same_top))
        }
        Err(why) => format!("KL not computed ({why})"),
    };
    let [then, now] = &computed.builds;
    let who = match then == now {
        true => "another model".to_owned(),
        false => format!("another model or build (recorded by {then}, now {now})"),
    };
    format!("{outcome}; {who}: agreement {} of {}, {kl}", percent(*num_same), counted(*num_tokens, "token"))
}

/// `" the" (id 262, p 0.4312)`.
fn choice(choice: &ReplayedToken) -> String {
    let ReplayedToken { id: Some(id), text, probability } = choice else { return choice.text.clone() };
    let probability = probability.map(|p| format!(", p {p:.4}")).unwrap_or_default();
    format!("\"{}\" (id {id}{probability})", visible(text))
}

fn object(answer: &AnswerRecord, computed: &Computed) -> Value {
    let status = if computed.difference.is_none() { "same" } else { "different" };
    let mut object = json!({
        "status": status,
        "tokens": answer.receipt.answer.len(),
        "same_model": computed.is_same_model,
        "recorded_build": computed.builds[0],
        "build": computed.builds[1],
    });
    if let Some(FirstDifference { position, recorded, replayed }) = &computed.difference {
        object["position"] = (*position).into();
        object["recorded"] = choice_json(recorded);
        object["replayed"] = choice_json(replayed);
    }
    if let Some(Agreement { num_tokens, num_same, divergence }) = &computed.agreement {
        object["scored_tokens"] = (*num_tokens).into();
        object["agreement"] = share(*num_same, *num_tokens).into();
        match divergence {
            Ok(AnswerDivergence { mean_kl, num_same_top }) => {
                object["same_top"] = share(*num_same_top, *num_tokens).into();
                object["mean_kl"] = (*mean_kl).into();
            }
            Err(why) => object["no_kl"] = why.as_str().into(),
        }
    }
    object
}

fn share(count: usize, of: usize) -> f64 {
    count as f64 / of.max(1) as f64
}

fn choice_json(choice: &ReplayedToken) -> Value {
    json!({"id": choice.id, "text": choice.text, "probability": choice.probability.map(decimal)})
}
