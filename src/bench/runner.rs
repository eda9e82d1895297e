//! Order of measurements: a warm-up of every case, then rounds of all cases on all engines, so that a slow
//! minute of the machine affects all of them alike.
//!
//! Knows neither models nor files: a [`BenchSubject`] measures, a [`BenchObserver`] gets the results. An
//! interruption keeps what was measured.

use std::ops::ControlFlow;

use super::plan::Case;
use super::record::{BenchSetting, CaseResult, Sample};
use crate::error::BenchError;

/// Reason why a measurement has no result.
#[derive(Debug)]
pub enum Halt {
    /// Interrupted by this signal.
    Interrupted(u8),
    Failed(BenchError),
}

impl<E: Into<BenchError>> From<E> for Halt {
    fn from(error: E) -> Self {
        Halt::Failed(error.into())
    }
}

/// Something to measure: an engine, or a mock with declared timings.
pub trait BenchSubject {
    fn setting(&self) -> &BenchSetting;

    /// Measures `case` once. The first call for a case is the warm-up and is not counted.
    ///
    /// # Errors
    /// [`Halt`].
    fn measure(&mut self, case: &Case) -> Result<Sample, Halt>;
}

/// Receiver of measurements.
pub trait BenchObserver {
    /// Called before `case` is measured on `setting`, with the number of finished and of all measurements.
    fn next(&mut self, case: &Case, setting: &BenchSetting, done: usize, total: usize);

    /// Called after a counted measurement, the last sample of the result at `index`. `Break` ends the run.
    ///
    /// # Errors
    /// If the results cannot be saved or written.
    fn measured(&mut self, results: &[CaseResult], index: usize) -> Result<ControlFlow<()>, BenchError>;
}

/// Numbers of rounds.
#[derive(Debug, Clone, Copy)]
pub struct Rounds {
    pub repetitions: usize,
    pub warm_up: bool,
}

/// Measures all cases on all subjects, and appends to `results` in the order of cases, then subjects. Returns
/// the signal that ended it early, if any.
///
/// # Errors
/// The first failure; `results` keeps what was measured before.
pub fn run(
    subjects: &mut [&mut dyn BenchSubject],
    cases: &[Case],
    rounds: Rounds,
    results: &mut Vec<CaseResult>,
    listener: &mut dyn BenchObserver,
) -> Result<Option<u8>, BenchError> {
    let first = results.len();
    let mut turns = Vec::new();
    for case in cases {
        for (subject, measured) in subjects.iter().enumerate() {
            turns.push((subject, case));
            results.push(CaseResult::new(case, measured.setting()));
        }
    }
    let num_rounds = rounds.repetitions + usize::from(rounds.warm_up);
    let total = num_rounds * turns.len();
    for round in 0..num_rounds {
        let is_warm_up = rounds.warm_up && round == 0;
        for place in 0..turns.len() {
            // Each round starts at another case, so that the same case does not always follow a heavy one.
            let turn = (place + round) % turns.len();
            let (subject, case) = turns[turn];
            let subject = &mut subjects[subject];
            listener.next(case, subject.setting(), round * turns.len() + place, total);
            match subject.measure(case) {
                Ok(_) if is_warm_up => {}
                Ok(sample) => {
                    results[first + turn].push(sample);
                    if listener.measured(results, first + turn)?.is_break() {
                        return Ok(None);
                    }
                }
                Err(Halt::Interrupted(signal)) => return Ok(Some(signal)),
                Err(Halt::Failed(error)) => {
                    return Err(BenchError::Case { name: case.name(), error: Box::new(error) });
                }
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
pub mod mock {
    //! An engine with declared timings.

    use std::collections::HashMap;

    use super::*;

    /// Returns the values declared for a case's name in order; the first is the warm-up's.
    #[derive(Debug, Default)]
    pub struct Mock {
        pub setting: BenchSetting,
        pub values: HashMap<&'static str, Vec<Sample>>,
        pub asked: Vec<String>,
        /// Number of the measurement that is interrupted.
        pub interrupted_at: Option<usize>,
    }

    impl Mock {
        pub fn new(threads: usize) -> Self {
            let setting = BenchSetting {
                model: "mock".to_owned(),
                threads,
                threads_batch: threads,
                kv_type: "f16".to_owned(),
                quantize: None,
                cpu: "avx2".to_owned(),
                step_tokens: 128,
            };
            Self { setting, ..Self::default() }
        }

        pub fn declare(mut self, test: &'static str, values: &[f64]) -> Self {
            let sample = |(index, value): (usize, &f64)| Sample {
                value: *value,
                at_s: index as f64,
                first_token_ms: Some(1000.0 / value),
                ..Sample::default()
            };
            self.values.insert(test, values.iter().enumerate().map(sample).collect());
            self
        }
    }

    impl BenchSubject for Mock {
        fn setting(&self) -> &BenchSetting {
            &self.setting
        }

        fn measure(&mut self, case: &Case) -> Result<Sample, Halt> {
            if self.interrupted_at == Some(self.asked.len()) {
                return Err(Halt::Interrupted(2));
            }
            let name = case.name();
            let count = self.asked.iter().filter(|asked| **asked == name).count();
            self.asked.push(name.clone());
            let declared = self.values.get(name.as_str()).and_then(|values| values.get(count)).cloned();
            declared.ok_or_else(|| BenchError::usage(format!("no value {count} for {name}")).into())
        }
    }

    /// Counts the calls.
    #[derive(Debug, Default)]
    pub struct Counting {
        pub announced: Vec<(usize, usize)>,
        pub saved: usize,
    }

    impl BenchObserver for Counting {
        fn next(&mut self, _case: &Case, _setting: &BenchSetting, done: usize, total: usize) {
            self.announced.push((done, total));
        }

        fn measured(&mut self, _: &[CaseResult], _: usize) -> Result<ControlFlow<()>, BenchError> {
            self.saved += 1;
            Ok(ControlFlow::Continue(()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::mock::{Counting, Mock};
    use super::*;
    use crate::plan::Work;

    fn cases() -> [Case; 2] {
        let case = |work| Case { work, depth: 0, sequences: 1 };
        [case(Work::Prompt { tokens: 512 }), case(Work::Generate { tokens: 128 })]
    }

    const TWICE: Rounds = Rounds { repetitions: 2, warm_up: true };

    fn mock(threads: usize) -> Mock {
        Mock::new(threads).declare("pp512", &[1.0, 100.0, 110.0]).declare("tg128", &[2.0, 20.0, 22.0])
    }

    #[test]
    fn cases_take_turns_and_the_warm_up_does_not_count() {
        let (mut one, mut two) = (mock(1), mock(2));
        let (mut results, mut listener) = (Vec::new(), Counting::default());
        let ended = run(&mut [&mut one, &mut two], &cases(), TWICE, &mut results, &mut listener);
        assert_eq!(ended.expect("no failure"), None);
        let found: Vec<_> =
            results.iter().map(|r| (r.test.as_str(), r.setting.threads, r.values())).collect();
        assert_eq!(
            found,
            [
                ("pp512", 1, vec![100.0, 110.0]),
                ("pp512", 2, vec![100.0, 110.0]),
                ("tg128", 1, vec![20.0, 22.0]),
                ("tg128", 2, vec![20.0, 22.0]),
            ]
        );
        assert_eq!(results[0].summary.median, 105.0);
        assert_eq!(one.asked, ["pp512", "tg128", "tg128", "pp512", "tg128", "pp512"]);
        assert_eq!((listener.saved, listener.announced.len()), (8, 12));
        assert_eq!(listener.announced.last(), Some(&(11, 12)));
    }

    #[test]
    fn an_interruption_leaves_what_was_measured() {
        let mut mock = Mock { interrupted_at: Some(4), ..mock(1) };
        let (mut results, mut listener) = (Vec::new(), Counting::default());
        let ended = run(&mut [&mut mock], &cases(), TWICE, &mut results, &mut listener);
        assert_eq!(ended.expect("no failure"), Some(2));
        assert_eq!(results.iter().map(|result| result.samples.len()).collect::<Vec<_>>(), [1, 1]);
    }

    #[test]
    fn a_failure_names_its_case() {
        let mut mock = Mock::new(1).declare("pp512", &[1.0; 9]);
        let (mut results, mut listener) = (Vec::new(), Counting::default());
        let error = run(&mut [&mut mock], &cases(), TWICE, &mut results, &mut listener).unwrap_err();
        assert_eq!(error.to_string(), "tg128: no value 0 for tg128");
    }
}
