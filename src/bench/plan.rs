//! Turns sweeps into cases, with llama-bench's names.
//!
//! Pure: loads nothing and reads no clock. A case knows what it needs (context, sequences) and what must be
//! reused (cached tokens), so that a run can be refused before it starts and a result doubted afterwards.

use serde::{Deserialize, Serialize};

use crate::error::BenchError;
use llmctl_models::kv::PAGE_TOKENS;

/// A comma-separated sweep over what `llmctl bench` is asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CaseSweep {
    /// 0 leaves the test out, here and in `generated`, as in llama-bench.
    pub prompts: Vec<usize>,
    pub generated: Vec<usize>,
    pub pairs: Vec<(usize, usize)>,
    pub depths: Vec<usize>,
    pub sequences: Vec<usize>,
    pub sessions: Vec<SessionTest>,
    /// New tokens of a session's second turn.
    pub turn: usize,
}

/// Measurements that need sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionTest {
    /// The second turn of a session that is in memory.
    Warm,
    /// The second turn after a restart, from KV on disk
    Restore,
    /// Sessions forked from one that is in memory, all at once
    Fork,
    /// Sessions that begin with the same system prompt, all at once
    Shared,
    /// A coding agent's first question after a restart: 20,000 tokens of system prompt and tools from KV on disk
    Agent,
}

/// Quantity that a case measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// `pp`: prompt tokens per second.
    Prompt { tokens: usize },
    /// `tg`: generated tokens per second, without the first.
    Generate { tokens: usize },
    /// `pp+tg`: tokens of both per second of the total time.
    Both { prompt: usize, generate: usize },
    /// Time to the first token of a prompt of `first + turn` tokens without reuse, which the others are
    /// compared with.
    Cold { first: usize, turn: usize },
    /// Time to the first token of `turn` new tokens after `first` that the session holds.
    Warm { first: usize, turn: usize },
    /// Same as `Warm`, in an engine that was just started.
    Restore { first: usize, turn: usize },
    /// Same as `Warm`, in forks of the session.
    Fork { first: usize, turn: usize },
    /// Time until several sessions with the same `first` tokens all have their first token.
    Shared { first: usize, turn: usize },
    /// Time to the first token of a new session in an engine that was just started, whose prompt begins with `first`
    /// tokens that another session left on disk.
    Agent { first: usize, turn: usize },
}

/// Tokens that a coding agent sends before its first question.
const AGENT_TOKENS: usize = 20_000;

/// One line of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Case {
    pub work: Work,
    /// Tokens in the KV cache before it starts.
    pub depth: usize,
    /// Sequences at once.
    pub sequences: usize,
}

/// Unit of a case's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unit {
    #[serde(rename = "t/s")]
    TokensPerSecond,
    #[serde(rename = "ms")]
    Milliseconds,
}

impl Unit {
    pub fn name(self) -> &'static str {
        match self {
            Unit::TokensPerSecond => "t/s",
            Unit::Milliseconds => "ms",
        }
    }

    pub fn more_is_better(self) -> bool {
        self == Unit::TokensPerSecond
    }
}

impl Case {
    /// Returns llama-bench's name (`pp512`, `tg128`, `tg128@d2048`), followed by ` x8` for eight sequences at
    /// once.
    pub fn name(&self) -> String {
        let work = match self.work {
            Work::Prompt { tokens } => format!("pp{tokens}"),
            Work::Generate { tokens } => format!("tg{tokens}"),
            Work::Both { prompt, generate } => format!("pp{prompt}+tg{generate}"),
            Work::Cold { first, turn } => format!("cold{first}+{turn}"),
            Work::Warm { first, turn } => format!("warm{first}+{turn}"),
            Work::Restore { first, turn } => format!("restore{first}+{turn}"),
            Work::Fork { first, turn } => format!("fork{first}+{turn}"),
            Work::Shared { first, turn } => format!("shared{first}+{turn}"),
            Work::Agent { first, turn } => format!("agent{first}+{turn}"),
        };
        let depth = if self.depth > 0 { format!("@d{}", self.depth) } else { String::new() };
        let sequences = if self.sequences > 1 { format!(" x{}", self.sequences) } else { String::new() };
        work + &depth + &sequences
    }

    pub fn unit(&self) -> Unit {
        match self.work {
            Work::Prompt { .. } | Work::Generate { .. } | Work::Both { .. } => Unit::TokensPerSecond,
            _ => Unit::Milliseconds,
        }
    }

    /// Returns the prompt and generated tokens of one sequence, without those at depth.
    pub fn tokens(&self) -> (usize, usize) {
        match self.work {
            Work::Prompt { tokens } => (tokens, 0),
            Work::Generate { tokens } => (0, tokens),
            Work::Both { prompt, generate } => (prompt, generate),
            Work::Cold { first, turn }
            | Work::Warm { first, turn }
            | Work::Restore { first, turn }
            | Work::Fork { first, turn }
            | Work::Shared { first, turn }
            | Work::Agent { first, turn } => (first + turn, 1),
        }
    }

    /// Returns the context that one sequence needs, including a few tokens that are not counted.
    pub fn context(&self) -> usize {
        const BEGINNINGS: usize = 16;
        let (prompt, generated) = self.tokens();
        // Sequences that generate together continue until the last has started.
        let waiting = if generated > 1 { self.sequences.saturating_sub(1) * 2 } else { 0 };
        self.depth + prompt + generated + waiting + BEGINNINGS
    }

    /// Returns the prompt tokens that must be reused; otherwise the case measures something else.
    pub fn cached(&self) -> usize {
        match self.work {
            Work::Prompt { .. } | Work::Generate { .. } | Work::Both { .. } => self.depth,
            Work::Cold { .. } | Work::Shared { .. } => 0,
            Work::Warm { first, .. } | Work::Restore { first, .. } | Work::Fork { first, .. } => first,
            // Another session's tokens are reused in whole pages.
            Work::Agent { first, .. } => first / PAGE_TOKENS * PAGE_TOKENS,
        }
    }

    /// Returns whether each repetition starts a new engine.
    pub fn restarts(&self) -> bool {
        matches!(self.work, Work::Restore { .. } | Work::Agent { .. })
    }
}

/// Returns the cases of a sweep in the order of a report.
///
/// # Errors
/// A usage error if there are none.
pub fn cases(sweep: &CaseSweep) -> Result<Vec<Case>, BenchError> {
    let works = sweep.prompts.iter().filter(|&&tokens| tokens > 0).map(|&tokens| Work::Prompt { tokens });
    let works = works
        .chain(sweep.generated.iter().filter(|&&tokens| tokens > 0).map(|&tokens| Work::Generate { tokens }));
    let works = works.chain(sweep.pairs.iter().map(|&(prompt, generate)| Work::Both { prompt, generate }));
    let mut cases = Vec::new();
    for work in works {
        for &depth in &sweep.depths {
            cases.extend(sweep.sequences.iter().map(|&sequences| Case { work, depth, sequences }));
        }
    }
    for &first in sweep.prompts.iter().filter(|&&tokens| tokens > 0) {
        cases.extend(session_cases(sweep, first));
    }
    if sweep.sessions.contains(&SessionTest::Agent) {
        let (first, turn) = (AGENT_TOKENS, sweep.turn);
        let works = [Work::Cold { first, turn }, Work::Agent { first, turn }];
        cases.extend(works.map(|work| Case { work, depth: 0, sequences: 1 }));
    }
    let mut seen = std::collections::HashSet::new();
    cases.retain(|case| seen.insert(*case));
    if cases.is_empty() {
        let hint = "-p N measures prompts, -n N generation, --pg P,G both; 0 leaves one out";
        return Err(BenchError::Usage { message: "nothing is left to measure".to_owned(), hint: Some(hint) });
    }
    Ok(cases)
}

fn session_cases(sweep: &CaseSweep, first: usize) -> Vec<Case> {
    const SESSIONS: usize = 4;
    let turn = sweep.turn;
    let case = |work, sequences| Case { work, depth: 0, sequences };
    let several: Vec<usize> = sweep.sequences.iter().copied().filter(|&count| count > 1).collect();
    let several = if several.is_empty() { vec![SESSIONS] } else { several };
    let alone = [
        (SessionTest::Warm, Work::Warm { first, turn }),
        (SessionTest::Restore, Work::Restore { first, turn }),
    ];
    let together = [
        (SessionTest::Fork, Work::Fork { first, turn }),
        (SessionTest::Shared, Work::Shared { first, turn }),
    ];
    let of = |tests: [(SessionTest, Work); 2], count: usize| {
        let asked = tests.into_iter().filter(|(test, _)| sweep.sessions.contains(test));
        let works: Vec<Work> = asked.map(|(_, work)| work).collect();
        let cold = (!works.is_empty()).then_some(Work::Cold { first, turn });
        cold.into_iter().chain(works).map(move |work| case(work, count))
    };
    of(alone, 1).chain(several.into_iter().flat_map(|count| of(together, count))).collect()
}

/// Parses `--pg P,G`.
pub fn pair(text: &str) -> Result<(usize, usize), String> {
    let parsed = text.split_once([',', '+']).and_then(|(p, g)| Some((p.parse().ok()?, g.parse().ok()?)));
    parsed.filter(|&(p, g)| p > 0 && g > 0).ok_or_else(|| "not of the form P,G, both at least 1".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sweep() -> CaseSweep {
        CaseSweep {
            prompts: vec![512],
            generated: vec![128],
            depths: vec![0],
            sequences: vec![1],
            turn: 32,
            ..CaseSweep::default()
        }
    }

    fn names(sweep: &CaseSweep) -> Vec<String> {
        cases(sweep).expect("cases").iter().map(Case::name).collect()
    }

    #[test]
    fn names_are_those_of_llama_bench() {
        assert_eq!(names(&sweep()), ["pp512", "tg128"]);
        let sweep =
            CaseSweep { depths: vec![0, 2048], sequences: vec![1, 8], pairs: vec![(16, 4)], ..sweep() };
        let pp = ["pp512", "pp512 x8", "pp512@d2048", "pp512@d2048 x8"].map(str::to_owned);
        let tg = pp.clone().map(|name| name.replace("pp512", "tg128"));
        let both = pp.clone().map(|name| name.replace("pp512", "pp16+tg4"));
        assert_eq!(names(&sweep), [pp, tg, both].concat());
    }

    #[test]
    fn zero_leaves_out_and_nothing_is_an_error() {
        assert_eq!(names(&CaseSweep { prompts: vec![0], ..sweep() }), ["tg128"]);
        assert_eq!(names(&CaseSweep { generated: vec![0, 128, 128], prompts: vec![], ..sweep() }), ["tg128"]);
        let nothing = CaseSweep { generated: vec![0], prompts: vec![0], ..sweep() };
        assert!(cases(&nothing).unwrap_err().to_string().contains("nothing is left"));
    }

    #[test]
    fn session_tests_come_with_what_they_are_compared_with() {
        use SessionTest::{Agent, Fork, Restore, Shared, Warm};
        let with = |sessions: &[SessionTest], sequences: &[usize]| {
            let sweep = CaseSweep {
                generated: vec![],
                sessions: sessions.to_vec(),
                sequences: sequences.to_vec(),
                ..sweep()
            };
            names(&sweep)[sequences.len()..].to_vec()
        };
        assert_eq!(with(&[Warm, Restore], &[1]), ["cold512+32", "warm512+32", "restore512+32"]);
        assert_eq!(with(&[Agent], &[1]), ["cold20000+32", "agent20000+32"]);
        let alone = CaseSweep { prompts: vec![0], generated: vec![], sessions: vec![Agent], ..sweep() };
        assert_eq!(names(&alone), ["cold20000+32", "agent20000+32"], "whatever -p is");
        assert_eq!(with(&[Fork, Shared], &[1, 8]), ["cold512+32 x8", "fork512+32 x8", "shared512+32 x8"]);
        assert_eq!(with(&[Shared], &[1]), ["cold512+32 x4", "shared512+32 x4"]);
    }

    #[test]
    fn a_case_knows_what_it_needs() {
        let case = |work, depth, sequences| Case { work, depth, sequences };
        assert_eq!(case(Work::Generate { tokens: 128 }, 2048, 1).context(), 2048 + 128 + 16);
        assert_eq!(case(Work::Generate { tokens: 128 }, 0, 8).context(), 128 + 14 + 16);
        assert_eq!(case(Work::Prompt { tokens: 512 }, 64, 1).cached(), 64);
        assert_eq!(case(Work::Warm { first: 512, turn: 32 }, 0, 1).cached(), 512);
        assert_eq!(case(Work::Shared { first: 512, turn: 32 }, 0, 4).cached(), 0);
        let agent = case(Work::Agent { first: 520, turn: 32 }, 0, 1);
        assert_eq!((agent.cached(), agent.restarts()), (512, true), "whole pages of another session");
    }

    #[test]
    fn pairs_are_two_numbers() {
        assert_eq!(pair("512,128"), Ok((512, 128)));
        for wrong in ["512", "0,1", "a,b", "1,2,3", ""] {
            assert!(pair(wrong).is_err(), "{wrong}");
        }
    }
}
