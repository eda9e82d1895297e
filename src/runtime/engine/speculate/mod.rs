//! Speculative decoding: rows for draft tokens, which a drafter expects next, join the step, and the sampler
//! accepts as many of them as it would have sampled anyway.
//!
//! Invariants: a draft is a guess and changes no answer. What a step computes beyond the known tokens depends
//! on measured times; what it delivers does not.

mod allotment;
mod assistant;
mod costs;
mod draft_model;
mod drafts;
mod ngram;
mod track;

use std::time::Duration;

use crate::request::ModelDrafter;
use crate::spec::Speculation;
use crate::step::Executor;
pub use allotment::DraftOffer;
pub use assistant::AssistantDrafter;
use costs::{Account, MAX_ROWS, StepCosts};
pub use draft_model::{DraftModel, Followed, wall_clock};
pub use drafts::{DraftText, Drafts};
use llmctl_base::notice::Notice;
pub use track::KnownText;

/// Steps without a draft of the draft model's after which the user may be told why.
const VAIN_STEPS: usize = 64;

/// Share of the model's own time for a token from which on a draft model can hardly pay, however right it is.
const TOO_SLOW: f64 = 0.6;

/// Draws up drafts: what it asks of each running generation.
pub trait Drafting {
    /// Returns the expected length and acceptance of a new draft of at most `most` tokens from what the generation knows
    /// itself.
    fn propose(&mut self, mode: Speculation, most: usize) -> Option<DraftOffer>;

    /// Returns what a drafter that computes needs for a draft of at most `most` tokens, in place of the one proposed.
    fn follow(&mut self, drafter: ModelDrafter, most: usize) -> Followed<'_>;

    /// Returns how probable it is that a token of a drafter that computes is accepted; `None` if it has stopped.
    fn model_acceptance(&self) -> Option<f64>;

    /// Notes that the draft model's draft was not worth its cost.
    fn pass(&mut self);

    /// Notes that the draft model was too unsure to draft.
    fn decline(&mut self);

    /// Keeps the first `len` tokens of the draft.
    fn keep_draft(&mut self, len: usize);

    /// Returns the length of the draft.
    fn draft_len(&self) -> usize;
}

/// A drafter that runs a model: a draft model, the model's own prediction block, or its assistant.
pub trait ComputingDrafter {
    fn drafter(&self) -> ModelDrafter;

    /// Returns what the user should know of it, once.
    fn take_notice(&mut self) -> Option<Notice>;

    /// Returns the seconds of a step of `num_rows` rows.
    fn cost(&self, num_rows: usize) -> f64;

    /// Returns the seconds of drafts of `lens` tokens, each after as many tokens as `lacking` says.
    fn drafting_cost(&self, lacking: &[usize], lens: &[usize]) -> f64 {
        let first: usize = lacking.iter().zip(lens).filter(|(_, len)| **len > 0).map(|(rows, _)| rows).sum();
        let rows =
            |step: usize| lens.iter().zip(lacking).filter(|(len, rows)| **len > step && **rows > 0).count();
        let longest = lens.iter().zip(lacking).filter(|(_, rows)| **rows > 0).map(|(len, _)| *len).max();
        let later: f64 = (1..longest.unwrap_or(0)).map(|step| self.cost(rows(step))).sum();
        if first == 0 { 0.0 } else { self.cost(first) + later }
    }

    /// Prepares a draft: computes of the text what is far behind, as far as `budget` seconds allow, in one step or, without
    /// a budget, in as many as it takes. Returns the number of tokens to compute before the draft, and how long the draft
    /// can be; `None` if there can be none in this step. Takes what it spends from `budget`.
    fn prepare(&mut self, followed: &mut Followed<'_>, budget: &mut Option<f64>) -> Option<(usize, usize)>;

    /// Drafts up to `len` tokens for each generation, and ends a draft before it is less probable than `least`. `executor` has
    /// the generations' model. Returns the seconds that it took.
    fn draft(&mut self, executor: &mut Executor, asked: Vec<(Followed<'_>, usize)>, least: f64) -> f64;
}

/// State of a draft while a drafter computes it, one token per step.
#[derive(Debug)]
struct DraftProgress {
    /// Tokens that it lacks; none if it has ended.
    left: usize,
    /// Probability of the draft so far, by the drafter.
    chance: f64,
}

impl DraftProgress {
    fn new(len: usize) -> Self {
        Self { left: len, chance: 1.0 }
    }

    fn goes_on(&self) -> bool {
        self.left > 0
    }

    fn end(&mut self) {
        self.left = 0;
    }

    /// Returns whether a token of this log-probability joins the draft; one that makes it less probable than `least` ends it.
    fn takes(&mut self, logprob: f32, least: f64) -> bool {
        self.chance *= f64::from(logprob).exp();
        let takes = self.chance >= least;
        self.left = if takes { self.left - 1 } else { 0 };
        takes
    }
}

/// Decides how many tokens are drafted in a step.
pub struct Speculator {
    mode: Speculation,
    costs: StepCosts,
    account: Account,
    computing: Option<Box<dyn ComputingDrafter>>,
    /// Seconds that it has spent on drafts since the last step that was learned from.
    spent: f64,
    /// Steps since the draft model drafted; more than [`VAIN_STEPS`] once the user was told.
    vain_steps: usize,
    notice: Option<Notice>,
}

impl Speculator {
    pub fn new(mode: Speculation) -> Self {
        let (costs, account) = Default::default();
        Self { mode, costs, account, computing: None, spent: 0.0, vain_steps: 0, notice: None }
    }

    pub fn is_off(&self) -> bool {
        self.mode == Speculation::Off
    }

    /// Drafts with `drafter` where nothing else does.
    pub fn set_computing(&mut self, drafter: impl ComputingDrafter + 'static) {
        self.computing = Some(Box::new(drafter));
    }

    /// Returns what the user should know of the drafter that computes, once.
    pub fn take_notice(&mut self) -> Option<Notice> {
        self.notice.take().or_else(|| self.computing.as_mut()?.take_notice())
    }

    /// Gives drafts to `generating`, those generations that sample in a step of `num_rows` rows, and at most
    /// `most_rows` with drafted ones. `executor` has their model. Returns the number of drafted rows.
    pub fn draft<D: Drafting>(
        &mut self,
        executor: &mut Executor,
        generating: &mut [&mut D],
        (num_rows, most_rows): (usize, usize),
    ) -> usize {
        let (room, each) = match self.mode {
            Speculation::Off => return 0,
            Speculation::Always(each) => (most_rows.saturating_sub(num_rows), each),
            Speculation::Auto | Speculation::Ngram | Speculation::Draft | Speculation::Mtp => {
                (most_rows.min(MAX_ROWS).saturating_sub(num_rows), MAX_ROWS)
            }
        };
        if room == 0 || (!self.is_forced() && !self.costs.is_known(num_rows)) {
            return 0;
        }
        let proposed = generating.iter_mut().map(|generation| generation.propose(self.mode, each.min(room)));
        let mut offers: Vec<DraftOffer> = proposed.map(Option::unwrap_or_default).collect();
        self.offer_by_model(generating, (num_rows, each.min(room)), &mut offers);
        let lens = match self.is_forced() {
            true => allotment::in_turn(&offers, room),
            false => allotment::by_gain(&offers, room, |lens| self.cost(num_rows, &offers, lens)),
        };
        let extra = self.cost(num_rows, &offers, &lens) - self.costs.of(num_rows);
        let is_allowed = self.is_forced() || self.account.allows(extra);
        let lens = if is_allowed { lens } else { vec![0; lens.len()] };
        let least = if self.is_forced() { 0.0 } else { self.least_chance(num_rows, lens.iter().sum()) };
        self.draft_by_model(executor, generating, (&offers, &lens), least);
        self.note_model(offers.iter().zip(&lens).any(|(offer, len)| offer.num_lacking > 0 && *len > 0));
        for (generation, (offer, len)) in generating.iter_mut().zip(offers.iter().zip(lens)) {
            match (offer.num_lacking, len) {
                (0, len) => generation.keep_draft(len),
                (_, 0) => generation.pass(),
                _ => {}
            }
        }
        generating.iter().map(|generation| generation.draft_len()).sum()
    }

    /// Returns the seconds of a step of `num_rows` known rows and drafts of `lens` tokens, with their making.
    fn cost(&self, num_rows: usize, offers: &[DraftOffer], lens: &[usize]) -> f64 {
        let num_drafted: usize = lens.iter().sum();
        let step = self.costs.of(num_rows) + self.costs.extra(num_rows, num_rows + num_drafted);
        let lacking: Vec<usize> = offers.iter().map(|offer| offer.num_lacking).collect();
        step + self.computing.as_ref().map_or(0.0, |drafter| drafter.drafting_cost(&lacking, lens))
    }

    /// Returns the tokens per second that an offer of one generation promises in a step of `num_rows` rows.
    fn promise(&self, offer: DraftOffer, num_rows: usize) -> f64 {
        let cost = |lens: &[usize]| self.cost(num_rows, &[offer], lens);
        let lens = allotment::by_gain(&[offer], offer.len, cost);
        let drafted: f64 = (1..=lens[0]).map(|len| offer.acceptance.powi(len as i32)).sum();
        (num_rows as f64 + drafted) / cost(&lens)
    }

    /// Returns whether a draft of the model's is to take the place of an offer from the text: there is none, or by the times
    /// measured it promises less.
    fn prefers_model(
        &self,
        offer: DraftOffer,
        acceptance: Option<f64>,
        num_rows: usize,
        most: usize,
    ) -> bool {
        let Some(acceptance) = acceptance else { return false };
        let by_model = DraftOffer { len: most, acceptance, num_lacking: 1 };
        offer.len == 0
            || !self.is_forced() && self.promise(by_model, num_rows) > self.promise(offer, num_rows)
    }

    /// Adds what the draft model can draft for generations without an offer, or with a worse one. What it reads for that is
    /// paid at once.
    fn offer_by_model<D: Drafting>(
        &mut self,
        generating: &mut [&mut D],
        (num_rows, most): (usize, usize),
        offers: &mut [DraftOffer],
    ) {
        let (is_forced, mode) = (self.is_forced(), self.mode);
        let prefers = |(generation, offer): (&&mut D, &DraftOffer)| {
            self.computing.is_some()
                && self.prefers_model(*offer, generation.model_acceptance(), num_rows, most)
        };
        let preferred: Vec<bool> = generating.iter().zip(offers.iter()).map(prefers).collect();
        let Some(model) = self.computing.as_mut().filter(|_| self.mode != Speculation::Ngram) else {
            return;
        };
        let before = self.account.for_reading();
        let mut budget = (!is_forced).then_some(before);
        let asked = generating.iter_mut().zip(offers).zip(preferred).filter(|(_, preferred)| *preferred);
        for ((generation, offer), _) in asked {
            let mut followed = generation.follow(model.drafter(), most);
            *offer = match model.prepare(&mut followed, &mut budget) {
                Some((num_lacking, len)) => DraftOffer { len, acceptance: followed.acceptance, num_lacking },
                None if offer.len == 0 => continue,
                None => generation.propose(mode, most).unwrap_or_default(),
            };
        }
        if let Some(left) = budget {
            self.account.pay_reading(before - left);
        }
    }

    /// Returns the probability below which a row for a drafted token costs more than the token saves.
    fn least_chance(&self, num_rows: usize, num_drafted: usize) -> f64 {
        let row = self.costs.extra(num_rows, num_rows + num_drafted) / num_drafted.max(1) as f64;
        row * num_rows as f64 / self.costs.of(num_rows)
    }

    /// Lets the draft model draft as many tokens as were granted, as long as the draft is at least so probable.
    fn draft_by_model<D: Drafting>(
        &mut self,
        executor: &mut Executor,
        generating: &mut [&mut D],
        (offers, lens): (&[DraftOffer], &[usize]),
        least: f64,
    ) {
        let Some(model) = &mut self.computing else { return };
        let granted = generating.iter_mut().zip(offers.iter().zip(lens));
        let granted = granted.filter(|(_, (offer, len))| offer.num_lacking > 0 && **len > 0);
        let asked: Vec<_> =
            granted.map(|(generation, (_, len))| (generation.follow(model.drafter(), *len), *len)).collect();
        if !asked.is_empty() {
            self.spent += model.draft(executor, asked, least);
        }
        for (generation, (offer, len)) in generating.iter_mut().zip(offers.iter().zip(lens)) {
            if offer.num_lacking > 0 && *len > 0 && generation.draft_len() == 0 {
                generation.decline();
            }
        }
    }

    /// Notes whether the draft model was granted a draft. Tells the user once if it is too slow for any, unless drafts are
    /// forced.
    fn note_model(&mut self, is_granted: bool) {
        let model = self.computing.as_ref().filter(|drafter| drafter.drafter() == ModelDrafter::DraftModel);
        let is_weighed = !self.is_forced() && self.vain_steps <= VAIN_STEPS;
        let Some(model) = model.filter(|_| is_weighed) else { return };
        let (draft, own) = (model.cost(1), self.costs.of(1));
        let is_slow = draft > TOO_SLOW * own;
        self.vain_steps = if is_granted || !is_slow { 0 } else { self.vain_steps + 1 };
        if self.vain_steps > VAIN_STEPS {
            let [draft, own] = [draft, own].map(Duration::from_secs_f64);
            self.notice = Some(Notice::DraftModelTooSlow { draft, own });
        }
    }

    fn is_forced(&self) -> bool {
        matches!(self.mode, Speculation::Always(_))
    }

    /// Learns from a step of generations only: `num_rows` known tokens, `num_drafted` drafted ones, of which
    /// `num_accepted` were taken.
    pub fn learn(&mut self, num_rows: usize, num_drafted: usize, num_accepted: usize, took: Duration) {
        if self.is_off() || num_rows + num_drafted > MAX_ROWS {
            return;
        }
        self.costs.learn(num_rows, num_rows + num_drafted, took);
        let per_token = self.costs.of(num_rows) / num_rows.max(1) as f64;
        let saved = num_accepted as f64 * per_token;
        let gain =
            saved - self.costs.extra(num_rows, num_rows + num_drafted) - std::mem::take(&mut self.spent);
        self.account.book(gain, self.costs.of(num_rows));
    }

    /// Notes a step with prompts.
    pub fn learn_prompts(&mut self, took: Duration) {
        self.account.book_other(took.as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::spec::{EngineConfig, EngineSpec};
    use llmctl_base::error::Result;
    use llmctl_models::kv::{KvGroup, KvKind, PageRef};
    use llmctl_models::model::{Batch, Logits, Model, ModelSpec};
    use llmctl_models::tensor::SharedBytes;

    struct Guess(DraftOffer, usize);

    impl Drafting for Guess {
        fn propose(&mut self, _: Speculation, most: usize) -> Option<DraftOffer> {
            Some(DraftOffer { len: self.0.len.min(most), ..self.0 })
        }

        fn follow(&mut self, _: ModelDrafter, _: usize) -> Followed<'_> {
            unreachable!("there is no draft model")
        }

        fn model_acceptance(&self) -> Option<f64> {
            None
        }

        fn pass(&mut self) {}

        fn decline(&mut self) {}

        fn keep_draft(&mut self, len: usize) {
            self.1 = len;
        }

        fn draft_len(&self) -> usize {
            self.1
        }
    }

    /// Runs `steps` steps in which a row more costs `slope` of a step and drafts hold with `rate`, of which
    /// the sequence's own estimate is right. Returns time with speculation over time without, and the drafts.
    fn simulate(slope: f64, rate: f64, steps: usize) -> (f64, usize) {
        let (mut speculator, mut executor) = (Speculator::new(Speculation::Auto), executor());
        let (mut time, mut tokens, mut drafts) = (0.0, 0.0, 0);
        let mut credit = 0.0;
        for _ in 0..steps {
            let offer = DraftOffer { len: MAX_ROWS, acceptance: 0.8, num_lacking: 0 };
            let mut guess = Guess(offer, 0);
            let num_drafted = speculator.draft(&mut executor, &mut [&mut guess], (1, 128));
            assert_eq!(num_drafted, guess.1);
            credit += num_drafted as f64 * rate;
            let num_accepted = (credit as usize).min(num_drafted);
            credit -= num_accepted as f64;
            let took = 1.0 + slope * num_drafted as f64;
            time += took;
            tokens += 1.0 + num_accepted as f64;
            drafts += usize::from(num_drafted > 0);
            speculator.learn(1, num_drafted, num_accepted, Duration::from_secs_f64(took / 1e3));
        }
        (time / tokens, drafts)
    }

    #[test]
    fn wrong_drafts_cost_at_most_two_percent_whatever_they_promise() {
        for slope in [0.02, 0.15, 0.5, 1.0] {
            let (cost, drafts) = simulate(slope, 0.0, 1000);
            assert!(cost < 1.02, "{cost} at {slope}");
            assert!(drafts > 0 || slope >= 0.5, "they are tried now and then");
        }
    }

    #[test]
    fn right_drafts_are_computed_as_far_as_rows_are_cheap() {
        let (cheap, _) = simulate(0.05, 1.0, 1000);
        assert!(cheap < 0.25, "{cheap}");
        let (dear, _) = simulate(1.0, 1.0, 1000);
        assert!(dear < 1.02, "{dear}");
    }

    const VOCAB: u32 = 500;

    /// Microseconds, advanced by whatever computes.
    type Hands = Arc<AtomicU64>;

    /// A model that counts on from the last token. A step takes so many microseconds, and so many more for each row.
    struct Counting {
        spec: ModelSpec,
        hands: Hands,
        times: [u64; 2],
        /// Logit of the token that it tells; the others have 0.
        logit: f32,
    }

    impl Model for Counting {
        fn spec(&self) -> &ModelSpec {
            &self.spec
        }

        fn forward(&mut self, batch: &Batch<'_>) -> Result<Logits> {
            let [step, row] = self.times;
            self.hands.fetch_add(step + row * batch.rows.len() as u64, Ordering::Relaxed);
            let vocab_size = VOCAB as usize;
            let mut values = Vec::new();
            for row in batch.rows.iter().filter(|row| row.wants_logits) {
                let from = values.len();
                values.resize(from + vocab_size, 0.0);
                values[from + ((row.token + 1) % VOCAB) as usize] = self.logit;
            }
            Ok(Logits { values, vocab_size })
        }

        fn copy_page(&mut self, _: PageRef, _: PageRef) -> Result<()> {
            Ok(())
        }

        fn free_page(&mut self, _: PageRef) {}

        fn export_page(&self, _: PageRef, _: &mut Vec<u8>) -> Result<()> {
            unreachable!("its pages are not saved")
        }

        fn import_page(&mut self, _: PageRef, _: SharedBytes) -> Result<()> {
            unreachable!("its pages are not saved")
        }
    }

    fn counting_spec() -> ModelSpec {
        ModelSpec {
            architecture: "counting".to_owned(),
            vocab_size: VOCAB as usize,
            context_length: 1 << 14,
            groups: vec![KvGroup { kind: KvKind::Full, page_bytes: 16 }],
            can_rewind: true,
            adapters: Vec::new(),
        }
    }

    /// The model that generates, which nothing here asks to compute.
    fn executor() -> Executor {
        let spec = counting_spec();
        let config = EngineConfig::new(spec.context_length, Vec::new());
        let engine = EngineSpec::new(spec.clone(), config).expect("valid");
        let model = Counting { spec, hands: Hands::default(), times: [0; 2], logit: 0.0 };
        Executor::new(Box::new(model), engine)
    }

    /// A generation that only the draft model drafts for.
    #[derive(Default)]
    struct Text {
        known: Vec<u32>,
        drafts: Drafts,
    }

    impl Drafting for Text {
        fn propose(&mut self, _: Speculation, _: usize) -> Option<DraftOffer> {
            None
        }

        fn follow(&mut self, drafter: ModelDrafter, most: usize) -> Followed<'_> {
            let (following, resident) = self.known.split_last().expect("a prompt");
            let text = KnownText { resident, following: std::slice::from_ref(following) };
            self.drafts.follow(drafter, (text, None), most)
        }

        fn model_acceptance(&self) -> Option<f64> {
            self.drafts.model_acceptance()
        }

        fn pass(&mut self) {
            self.drafts.pass();
        }

        fn decline(&mut self) {
            self.drafts.decline();
        }

        fn keep_draft(&mut self, len: usize) {
            self.drafts.keep(len);
        }

        fn draft_len(&self) -> usize {
            self.drafts.tokens().len()
        }
    }

    /// Draft model of a simulation.
    struct Drafted {
        /// Microseconds of a step and of each row; a step of the model takes 10,000, and 1,000 for each further row.
        times: [u64; 2],
        /// Every so manyeth token is one that the draft model does not expect.
        wrong_every: usize,
        prompt_len: usize,
        is_sure: bool,
    }

    /// Runs answers of 400 tokens each, one after the other. Returns the time over the time without drafts, and the drafted
    /// and accepted tokens.
    fn simulate_model(drafted: &Drafted, num_answers: usize) -> (f64, usize, usize) {
        let (cost, [num_drafted, num_accepted], _) = simulate_with_notice(drafted, num_answers);
        (cost, num_drafted, num_accepted)
    }

    /// The same, with what the user is told.
    fn simulate_with_notice(drafted: &Drafted, num_answers: usize) -> (f64, [usize; 2], Option<Notice>) {
        let (spec, mut executor) = (counting_spec(), executor());
        let main = EngineSpec::new(spec.clone(), EngineConfig::new(1 << 14, Vec::new())).expect("valid");
        let hands = Hands::default();
        let clock = {
            let hands = hands.clone();
            move || Duration::from_micros(hands.load(Ordering::Relaxed))
        };
        let logit = if drafted.is_sure { 30.0 } else { 1.0 };
        let model = Counting { spec, hands: hands.clone(), times: drafted.times, logit };
        let model = DraftModel::new(Box::new(model), &main, Box::new(clock)).expect("a draft model");
        let mut speculator = Speculator::new(Speculation::Auto);
        speculator.set_computing(model);
        hands.store(0, Ordering::Relaxed);
        let (mut plain, mut num_drafted, mut num_accepted) = (0, 0, 0);
        for answer in 0..num_answers {
            let known = (0..drafted.prompt_len).map(|token| (token * 7 + answer) as u32 % VOCAB).collect();
            let mut text = Text { known, ..Text::default() };
            let read = Duration::from_micros(500 * drafted.prompt_len as u64);
            hands.fetch_add(read.as_micros() as u64, Ordering::Relaxed);
            plain += read.as_micros() as u64 + 10_000 * 400;
            speculator.learn_prompts(read);
            while text.known.len() < drafted.prompt_len + 400 {
                let count = speculator.draft(&mut executor, &mut [&mut text], (1, 128));
                let draft = text.drafts.tokens().to_vec();
                assert_eq!(draft.len(), count);
                let next = |known: &[u32]| {
                    let is_wrong = known.len().is_multiple_of(drafted.wrong_every);
                    (known.last().expect("a prompt") + 1 + u32::from(is_wrong)) % VOCAB
                };
                let mut accepted = 0;
                while accepted < count && draft[accepted] == next(&text.known) {
                    text.known.push(draft[accepted]);
                    accepted += 1;
                }
                text.known.push(next(&text.known));
                text.drafts.end(accepted, true);
                let took = Duration::from_micros(10_000 + 1_000 * count as u64);
                hands.fetch_add(took.as_micros() as u64, Ordering::Relaxed);
                speculator.learn(1, count, accepted, took);
            }
            num_drafted += text.drafts.totals().0;
            num_accepted += text.drafts.totals().1;
        }
        let cost = hands.load(Ordering::Relaxed) as f64 / plain as f64;
        (cost, [num_drafted, num_accepted], speculator.take_notice())
    }

    #[test]
    fn a_draft_model_as_slow_as_the_model_drafts_nothing_and_the_user_is_told_why() {
        let told = |times| {
            let drafted = Drafted { times, wrong_every: 1_000, prompt_len: 10, is_sure: true };
            simulate_with_notice(&drafted, 2)
        };
        let (_, [num_drafted, _], notice) = told([10_000, 0]);
        assert_eq!(num_drafted, 0);
        let notice = notice.map(|notice| notice.to_string()).unwrap_or_default();
        assert!(
            notice.starts_with("the draft model takes 10.0ms for a token and the model 10.0ms"),
            "{notice}"
        );
        let (_, [num_drafted, _], notice) = told([2_000, 100]);
        assert!(num_drafted > 100 && notice.is_none(), "{num_drafted} {notice:?}");
    }

    #[test]
    fn a_draft_model_that_is_always_wrong_costs_at_most_two_percent() {
        for times in [[100, 20], [1_000, 100], [5_000, 500], [20_000, 2_000]] {
            for prompt_len in [10, 200, 3_000] {
                let (cost, drafted, accepted) =
                    simulate_model(&Drafted { times, wrong_every: 1, prompt_len, is_sure: true }, 5);
                assert_eq!(accepted, 0);
                assert!(cost < 1.02, "{cost} with {times:?} after {prompt_len} tokens");
                assert!(drafted > 0 || times[0] >= 5_000, "it is tried: {times:?} after {prompt_len} tokens");
            }
        }
    }

    #[test]
    fn a_draft_model_that_is_right_is_used_as_far_as_it_is_cheap() {
        let cost = |times, wrong_every, prompt_len| {
            simulate_model(&Drafted { times, wrong_every, prompt_len, is_sure: true }, 5).0
        };
        assert!(cost([1_000, 100], 1_000, 10) < 0.4, "{}", cost([1_000, 100], 1_000, 10));
        assert!(cost([1_000, 100], 5, 200) < 0.65, "{}", cost([1_000, 100], 5, 200));
        assert!(cost([1_000, 50], 5, 3_000) < 0.9, "{}", cost([1_000, 50], 5, 3_000));
        assert!(cost([20_000, 2_000], 1_000, 10) < 1.02, "{}", cost([20_000, 2_000], 1_000, 10));
    }

    #[test]
    fn a_draft_model_that_is_unsure_drafts_nothing_and_costs_at_most_two_percent() {
        let drafted = Drafted { times: [1_000, 100], wrong_every: 1_000, prompt_len: 10, is_sure: false };
        let (cost, drafted, _) = simulate_model(&drafted, 5);
        assert!(cost < 1.02, "{cost}");
        assert_eq!(drafted, 0);
    }

    #[test]
    fn a_model_takes_the_place_of_a_text_that_promises_less() {
        let mut speculator = Speculator::new(Speculation::Auto);
        (0..2).for_each(|_| speculator.learn(1, 0, 0, Duration::from_millis(10)));
        let text = |acceptance| DraftOffer { len: 4, acceptance, num_lacking: 0 };
        assert!(speculator.prefers_model(DraftOffer::default(), Some(0.1), 1, 4));
        assert!(speculator.prefers_model(text(0.25), Some(0.8), 1, 4));
        assert!(!speculator.prefers_model(text(0.9), Some(0.8), 1, 4));
        assert!(!speculator.prefers_model(text(0.1), None, 1, 4), "it has stopped");
    }
}
