//! Decides what the next step computes: a pure function of plain numbers. Knows no sequence, page or model.
//!
//! Admission is in order of arrival. A request that does not fit now is bypassed by at most [`MAX_BYPASSES`]
//! later ones; then no request starts until it does. A request counts with the memory of its greatest length,
//! so none that has started is ever preempted.
//!
//! A step has at most as many rows as the budget, and beyond it those of one image at the most whose rows see each other and
//! so are computed in one step. Each generation gets one. Beside generations a step may be shorter, because they wait for it. Of
//! the rest the oldest prompt gets half, and the other prompts get equal shares. If there are too few rows, the least recently scheduled
//! come first. So a sequence waits fewer steps than there are sequences running, and none if the budget is at
//! least twice their number.

/// Most requests that may start before an earlier one that does not fit yet.
///
/// Small, because each may keep its memory for as long as it generates. Not zero, because memory that a large
/// request waits for can serve small ones until the rest of it is free.
pub const MAX_BYPASSES: usize = 8;

/// A request that waits for admission.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WaitingRequest {
    /// Prompt tokens to compute.
    pub prompt_left: usize,
    /// Memory at its greatest length, in the unit of [`Budget::bytes`].
    pub bytes: usize,
    /// Later requests that have started before it.
    pub num_bypassed: usize,
}

/// A request that has been admitted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RunningRequest {
    /// Tokens of the prompt, or forced by a grammar, still to compute; 0 if it generates one token per step.
    pub prompt_left: usize,
    /// Logical time of its last row, or of its admission; lower is longer ago. Sequences with rows in the
    /// same step keep their relative order.
    pub last_scheduled: u64,
    /// True if another sequence computes its next chunk in this step, so that it gets no row. Ignored for one
    /// that generates. The sequence that computes the chunk must not be deferred itself.
    pub deferred: bool,
    /// Number of its first rows that a step computes all or none of; 0 without any.
    pub whole: usize,
}

/// Resources of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Rows of a step.
    pub tokens: usize,
    /// Rows of a step in which some requests generate; each of these has one even if they are more.
    pub beside: usize,
    /// Requests running at once.
    pub running: usize,
    /// Memory that is promised to no request.
    pub bytes: usize,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// Ascending indices of the waiting requests that start.
    pub admitted: Vec<usize>,
    /// Rows of each running request, then of each admitted one. A request with 0 waits for the next step.
    pub rows: Vec<usize>,
}

/// Plans the next step. Deterministic.
pub fn plan_step(waiting: &[WaitingRequest], running: &[RunningRequest], budget: Budget) -> StepPlan {
    let admitted = choose_admitted(waiting, running.len(), budget);
    let started = admitted.iter().map(|&index| waiting[index].prompt_left);
    let started = started.map(|prompt_left| RunningRequest {
        prompt_left,
        last_scheduled: u64::MAX,
        ..RunningRequest::default()
    });
    let running: Vec<RunningRequest> = running.iter().copied().chain(started).collect();
    let mut rows = share_rows(&running, budget);
    keep_whole(&running, &mut rows);
    StepPlan { rows, admitted }
}

/// Gives the least recently scheduled of the sequences that got a part of what is computed whole all of it; the others wait.
fn keep_whole(running: &[RunningRequest], rows: &mut [usize]) {
    let is_cut = |index: &usize| rows[*index] > 0 && rows[*index] < running[*index].whole;
    let cut: Vec<usize> = (0..rows.len()).filter(is_cut).collect();
    let served = cut.iter().copied().min_by_key(|&index| (running[index].last_scheduled, index));
    for index in cut {
        rows[index] = if served == Some(index) { running[index].whole } else { 0 };
    }
}

fn choose_admitted(waiting: &[WaitingRequest], num_running: usize, budget: Budget) -> Vec<usize> {
    let places = budget.running.saturating_sub(num_running);
    let mut bytes_left = budget.bytes;
    let mut bypasses_left = usize::MAX; // no request is bypassed yet
    let mut admitted = Vec::new();
    for (index, request) in waiting.iter().enumerate() {
        if admitted.len() == places || bypasses_left == 0 {
            break;
        }
        match bytes_left.checked_sub(request.bytes) {
            Some(left) => {
                bytes_left = left;
                bypasses_left -= 1;
                admitted.push(index);
            }
            None => {
                bypasses_left = bypasses_left.min(MAX_BYPASSES.saturating_sub(request.num_bypassed));
            }
        }
    }
    admitted
}

fn share_rows(running: &[RunningRequest], Budget { tokens, beside, .. }: Budget) -> Vec<usize> {
    let mut rows = vec![0; running.len()];
    let may_advance = |&index: &usize| running[index].prompt_left == 0 || !running[index].deferred;
    let advancing = (0..running.len()).filter(may_advance);
    let (generating, prompts): (Vec<_>, Vec<_>) =
        advancing.partition(|&index| running[index].prompt_left == 0);
    if generating.len() + usize::from(!prompts.is_empty()) > tokens {
        serve_least_recent(running, &[generating, prompts].concat(), tokens, &mut rows);
    } else {
        generating.iter().for_each(|&index| rows[index] = 1);
        let most = if generating.is_empty() { tokens } else { tokens.min(beside) };
        share_among_prompts(running, &prompts, most.saturating_sub(generating.len()).max(1), &mut rows);
    }
    rows
}

/// Gives the oldest prompt half of `tokens` and what the others leave.
///
/// With equal shares for all, many long prompts would all end late; one after the other, a short prompt would
/// wait for long ones. This way the oldest takes at most twice as long as alone, and a short prompt starts at
/// once.
fn share_among_prompts(running: &[RunningRequest], prompts: &[usize], tokens: usize, rows: &mut [usize]) {
    let Some((&oldest, others)) = prompts.split_first() else { return };
    if tokens < 2 {
        return serve_least_recent(running, prompts, tokens, rows);
    }
    let first_share = running[oldest].prompt_left.min(tokens.div_ceil(2));
    let left = share_fairly(running, others, tokens - first_share, rows);
    rows[oldest] = running[oldest].prompt_left.min(first_share + left);
}

/// Shares rows by max-min fairness: equal shares, with what short prompts leave going to longer ones and the
/// remainder of a division to earlier ones. Returns the rows that are left.
fn share_fairly(running: &[RunningRequest], prompts: &[usize], tokens: usize, rows: &mut [usize]) -> usize {
    if tokens < prompts.len() {
        serve_least_recent(running, prompts, tokens, rows);
        return 0;
    }
    let mut order = prompts.to_vec();
    order.sort_by_key(|&index| (running[index].prompt_left, std::cmp::Reverse(index)));
    let mut left = tokens;
    for (served, &index) in order.iter().enumerate() {
        rows[index] = running[index].prompt_left.min(left / (order.len() - served));
        left -= rows[index];
    }
    left
}

/// Gives one row each to the least recently scheduled sequences, as far as `tokens` go.
fn serve_least_recent(running: &[RunningRequest], sequences: &[usize], tokens: usize, rows: &mut [usize]) {
    let mut order = sequences.to_vec();
    order.sort_by_key(|&index| (running[index].last_scheduled, index));
    order.iter().take(tokens).for_each(|&index| rows[index] = 1);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn budget(tokens: usize, running: usize, bytes: usize) -> Budget {
        Budget { tokens, beside: 128.max(tokens / 2), running, bytes }
    }

    fn prompts(left: &[usize]) -> Vec<RunningRequest> {
        left.iter().map(|&prompt_left| RunningRequest { prompt_left, ..RunningRequest::default() }).collect()
    }

    /// Checks the rows of sequences with so many prompt tokens left.
    #[track_caller]
    fn check_rows(left: &[usize], tokens: usize, expected: &[usize]) {
        let plan = plan_step(&[], &prompts(left), budget(tokens, 4, 9));
        assert_eq!(plan.rows, expected, "{left:?} in {tokens}");
    }

    /// Sequences as (prompt left, last scheduled).
    #[track_caller]
    fn check_order(sequences: &[(usize, u64)], tokens: usize, expected: &[usize]) {
        let running = |&(prompt_left, last_scheduled)| RunningRequest {
            prompt_left,
            last_scheduled,
            ..RunningRequest::default()
        };
        let running: Vec<_> = sequences.iter().map(running).collect();
        assert_eq!(
            plan_step(&[], &running, budget(tokens, 4, 9)).rows,
            expected,
            "{sequences:?} in {tokens}"
        );
    }

    /// Requests as (bytes, times bypassed).
    #[track_caller]
    fn check_admitted(waiting: &[(usize, usize)], num_running: usize, places: usize, expected: &[usize]) {
        let waiting: Vec<_> = waiting
            .iter()
            .map(|&(bytes, num_bypassed)| WaitingRequest { prompt_left: 4, bytes, num_bypassed })
            .collect();
        let plan = plan_step(&waiting, &prompts(&vec![0; num_running]), budget(100, places, 9));
        assert_eq!(plan.admitted, expected, "{waiting:?}");
        assert_eq!(plan.rows, [vec![1; num_running], vec![4; expected.len()]].concat());
    }

    #[test]
    fn generations_get_one_row_each_and_prompts_share_the_rest() {
        check_rows(&[], 8, &[]);
        check_rows(&[0, 0], 8, &[1, 1]);
        check_rows(&[0, 100], 8, &[1, 7]);
        check_rows(&[100, 100], 8, &[4, 4]);
        check_rows(&[3, 100], 8, &[3, 5]);
        check_rows(&[100, 3, 0], 8, &[4, 3, 1]);
        check_rows(&[100, 1, 0], 8, &[6, 1, 1]);
        check_rows(&[0, 4000, 0, 0], 128, &[1, 125, 1, 1]);
    }

    #[test]
    fn beside_generations_steps_are_shorter() {
        check_rows(&[4000], 256, &[256]);
        check_rows(&[4000, 4000], 256, &[128, 128]);
        check_rows(&[0, 4000], 256, &[1, 127]);
        check_rows(&[0, 4000], 200, &[1, 127]);
        check_rows(&[0, 4000], 512, &[1, 255]);
        let left = [vec![0; 140], vec![4000]].concat();
        check_rows(&left, 256, &vec![1; 141]);
    }

    #[test]
    fn the_oldest_prompt_gets_half_and_the_others_equal_shares() {
        check_rows(&[100, 100, 100], 8, &[4, 2, 2]);
        check_rows(&[100, 100, 100], 9, &[5, 2, 2]);
        check_rows(&[100, 100, 100], 11, &[6, 3, 2]);
        check_rows(&[100, 100, 1, 100], 12, &[6, 3, 1, 2]);
        check_rows(&[2, 100, 100, 100], 11, &[2, 3, 3, 3]);
        check_rows(&[100, 1, 1, 1], 16, &[13, 1, 1, 1]);
    }

    #[test]
    fn with_few_rows_the_least_recently_scheduled_come_first() {
        check_order(&[(9, 4), (9, 3), (9, 2), (9, 1)], 3, &[2, 0, 0, 1]);
        check_order(&[(9, 4), (9, 3), (9, 1), (9, 2)], 5, &[3, 0, 1, 1]);
        check_order(&[(9, 2), (9, 1)], 1, &[0, 1]);
        check_order(&[(9, 1), (9, 2)], 1, &[1, 0]);
        check_order(&[(0, 3), (0, 1), (0, 2), (50, 4)], 3, &[1, 1, 1, 0]);
        check_order(&[(0, 2), (0, 3), (0, 4), (50, 1)], 3, &[1, 1, 0, 1]);
        check_order(&[(0, 4), (0, 1), (0, 2), (0, 3)], 3, &[0, 1, 1, 1]);
        check_order(&[(0, 1), (0, 2), (50, 3)], 3, &[1, 1, 1]);
    }

    #[test]
    fn a_deferred_prompt_gets_no_row_and_others_get_its_share() {
        let hold = |deferred: &[usize]| {
            let mut running = prompts(&[100, 0, 100, 100]);
            deferred.iter().for_each(|&index| running[index].deferred = true);
            plan_step(&[], &running, budget(9, 4, 9)).rows
        };
        assert_eq!(hold(&[]), [4, 1, 2, 2]);
        assert_eq!(hold(&[2]), [4, 1, 0, 4]);
        assert_eq!(hold(&[0]), [0, 1, 4, 4]);
        assert_eq!(hold(&[0, 2, 3]), [0, 1, 0, 0]);
        assert_eq!(hold(&[1]), [4, 1, 2, 2], "one that generates is not held");
    }

    #[test]
    fn what_is_computed_whole_goes_beyond_the_budget_one_at_a_time() {
        let rows = |sequences: &[(usize, usize, u64)]| {
            let running = |&(prompt_left, whole, last_scheduled)| RunningRequest {
                prompt_left,
                whole,
                last_scheduled,
                ..RunningRequest::default()
            };
            plan_step(&[], &sequences.iter().map(running).collect::<Vec<_>>(), budget(8, 4, 9)).rows
        };
        assert_eq!(rows(&[(0, 0, 1), (256, 256, 2)]), [1, 256], "decoding goes along");
        assert_eq!(rows(&[(5, 5, 1)]), [5], "it fits");
        assert_eq!(rows(&[(256, 256, 2), (64, 64, 1), (9, 0, 3)]), [0, 64, 2]);
        assert_eq!(rows(&[(256, 256, 1), (64, 64, 2), (9, 0, 3)]), [256, 0, 2]);
    }

    #[test]
    fn admission_is_bounded_by_places_and_memory() {
        check_admitted(&[(2, 0), (2, 0), (2, 0)], 0, 2, &[0, 1]);
        check_admitted(&[(1, 0)], 1, 1, &[]);
        check_admitted(&[(9, 0), (1, 0)], 1, 8, &[0]);
        check_admitted(&[(10, 0)], 1, 8, &[]);
    }

    #[test]
    fn requests_that_fit_bypass_those_that_do_not_a_bounded_number_of_times() {
        check_admitted(&[(5, 0), (5, 0), (1, 0)], 0, 8, &[0, 2]);
        check_admitted(&[(10, 7), (1, 0), (1, 0)], 0, 8, &[1]);
        check_admitted(&[(10, 8), (1, 0), (1, 0)], 0, 8, &[]);
        check_admitted(&[(9, 8), (1, 0)], 0, 8, &[0]);
        check_admitted(&[(10, 0), (10, 6), (1, 0), (1, 0), (1, 0)], 0, 8, &[2, 3]);
        check_admitted(&[(1, 0), (10, 8), (1, 0)], 0, 8, &[0]);
    }

    /// Applies a plan's rows to the sequences.
    fn advance<'a>(running: impl Iterator<Item = &'a mut RunningRequest>, rows: &[usize]) {
        let mut all: Vec<_> = running.zip(rows).collect();
        all.sort_by_key(|(running, rows)| (**rows > 0, running.last_scheduled));
        for (last_scheduled, (running, rows)) in (0..).zip(all) {
            running.prompt_left = running.prompt_left.saturating_sub(*rows); // already 0 for a generation
            running.last_scheduled = last_scheduled;
        }
    }

    /// Runs plans against a queue with the engine's bookkeeping. A sequence without prompt left has ended.
    struct Simulation {
        waiting: Vec<WaitingRequest>,
        running: Vec<(RunningRequest, usize)>,
        bytes: usize,
    }

    impl Simulation {
        fn step(&mut self, tokens: usize, places: usize) {
            let running: Vec<_> = self.running.iter().map(|(running, _)| *running).collect();
            let plan = plan_step(&self.waiting, &running, budget(tokens, places, self.bytes));
            for (place, request) in self.waiting.iter_mut().enumerate() {
                request.num_bypassed += plan.admitted.iter().filter(|&&index| index > place).count();
                assert!(plan.admitted.contains(&place) || request.num_bypassed <= MAX_BYPASSES);
            }
            for &index in &plan.admitted {
                let WaitingRequest { prompt_left, bytes, .. } = self.waiting[index];
                self.bytes -= bytes;
                let started = RunningRequest { prompt_left, last_scheduled: u64::MAX, ..Default::default() };
                self.running.push((started, bytes));
            }
            let mut index = 0..;
            self.waiting.retain(|_| index.next().is_none_or(|index| !plan.admitted.contains(&index)));
            advance(self.running.iter_mut().map(|(running, _)| running), &plan.rows);
            let ended = self.running.iter().filter(|(running, _)| running.prompt_left == 0);
            self.bytes += ended.map(|(_, bytes)| bytes).sum::<usize>();
            self.running.retain(|(running, _)| running.prompt_left > 0);
        }
    }

    proptest! {
        #[test]
        fn a_plan_stays_within_its_budget_and_always_makes_progress(
            waiting in prop::collection::vec((1usize..300, 1usize..20, 0usize..12), 0..6),
            running in prop::collection::vec((0usize..300, 0u64..9, any::<bool>()), 0..6),
            tokens in 1usize..64, places in 1usize..8, bytes in 0usize..64,
        ) {
            let waiting: Vec<_> = waiting.into_iter()
                .map(|(prompt_left, bytes, num_bypassed)| WaitingRequest { prompt_left, bytes, num_bypassed })
                .collect();
            let running: Vec<_> = running.into_iter()
                .map(|(prompt_left, last_scheduled, deferred)| RunningRequest { prompt_left, last_scheduled, deferred, whole: 0 })
                .collect();
            let plan = plan_step(&waiting, &running, budget(tokens, places, bytes));
            let admitted: Vec<_> = plan.admitted.iter().map(|&index| waiting[index]).collect();
            prop_assert!(plan.admitted.is_sorted() && plan.rows.len() == running.len() + admitted.len());
            prop_assert!(admitted.is_empty() || running.len() + admitted.len() <= places);
            prop_assert!(admitted.iter().map(|request| request.bytes).sum::<usize>() <= bytes);
            prop_assert!(plan.rows.iter().sum::<usize>() <= tokens);
            for (running, &rows) in running.iter().zip(&plan.rows) {
                prop_assert!(rows <= running.prompt_left.max(1));
                prop_assert!(rows == 0 || !running.deferred || running.prompt_left == 0);
            }
            let num_generating = running.iter().filter(|running| running.prompt_left == 0).count();
            let can_advance = running.iter().any(|r| !r.deferred || r.prompt_left == 0) || !admitted.is_empty();
            prop_assert_eq!(plan.rows.iter().any(|&rows| rows > 0), can_advance);
            if num_generating < tokens {
                let generating = running.iter().zip(&plan.rows).filter(|(r, _)| r.prompt_left == 0);
                prop_assert!(generating.map(|(_, rows)| *rows).all(|rows| rows == 1), "never starved by prompts");
            }
            let wanted: usize = running.iter().filter(|r| !r.deferred).map(|r| r.prompt_left).sum();
            let wanted = num_generating + wanted + admitted.iter().map(|request| request.prompt_left).sum::<usize>();
            if num_generating < tokens {
                prop_assert_eq!(plan.rows.iter().sum::<usize>(), wanted.min(tokens), "no row is wasted");
            }
        }

        #[test]
        fn nobody_goes_without_for_as_many_steps_as_there_are_sequences(
            left in prop::collection::vec(prop_oneof![Just(0usize), 1usize..200], 1..9),
            tokens in prop::collection::vec(1usize..20, 1..60),
        ) {
            let mut running = prompts(&left);
            let mut num_skipped = vec![0; running.len()];
            for &tokens in &tokens {
                let plan = plan_step(&[], &running, budget(tokens, 9, 0));
                advance(running.iter_mut(), &plan.rows);
                for (skipped, &rows) in num_skipped.iter_mut().zip(&plan.rows) {
                    *skipped = if rows == 0 { *skipped + 1 } else { 0 };
                    prop_assert!(*skipped < running.len());
                    prop_assert!(*skipped == 0 || tokens < 2 * running.len());
                }
            }
        }

        #[test]
        fn where_all_take_turns_none_gets_two_rows_more_than_another(
            num_running in 1usize..12, tokens in 1usize..12, num_steps in 1usize..100,
        ) {
            let mut running = prompts(&vec![0; num_running]);
            let mut num_rows = vec![0; num_running];
            for _ in 0..num_steps {
                let plan = plan_step(&[], &running, budget(tokens, num_running, 0));
                advance(running.iter_mut(), &plan.rows);
                num_rows.iter_mut().zip(&plan.rows).for_each(|(total, rows)| *total += rows);
            }
            let (least, most) = (num_rows.iter().min(), num_rows.iter().max());
            prop_assert!(most.copied() <= least.map(|least| least + 1), "{:?}", num_rows);
        }

        #[test]
        fn the_oldest_prompt_takes_at_most_twice_as_long_as_alone(
            first in 1usize..2000, others in prop::collection::vec(1usize..2000, 0..8), tokens in 2usize..200,
        ) {
            let mut left = [&[first][..], &others].concat();
            let mut num_steps = 0;
            while left[0] > 0 {
                let waiting: Vec<_> = left.iter().copied().filter(|&left| left > 0).collect();
                let rows = plan_step(&[], &prompts(&waiting), budget(tokens, 9, 0)).rows;
                let unfinished = left.iter_mut().filter(|left| **left > 0);
                unfinished.zip(&rows).for_each(|(left, rows)| *left -= rows);
                num_steps += 1;
            }
            prop_assert!(num_steps <= first.div_ceil(tokens.div_ceil(2)));
        }

        #[test]
        fn a_waiting_request_is_bypassed_a_bounded_number_of_times_and_starts_in_the_end(
            requests in prop::collection::vec((1usize..=20, 1usize..30), 1..40),
            tokens in 1usize..20, places in 1usize..6,
        ) {
            let waiting = |&(bytes, prompt_left)| WaitingRequest { prompt_left, bytes, num_bypassed: 0 };
            let waiting: Vec<_> = requests.iter().map(waiting).collect();
            let mut simulation = Simulation { waiting, running: vec![], bytes: 20 };
            let num_rows: usize = requests.iter().map(|(_, rows)| rows).sum();
            (0..num_rows).for_each(|_| simulation.step(tokens, places));
            prop_assert!(simulation.waiting.is_empty() && simulation.running.is_empty());
            prop_assert_eq!(simulation.bytes, 20);
        }

        #[test]
        fn nobody_gets_two_rows_less_than_another_unless_it_wants_no_more(
            wants in prop::collection::vec(1usize..50, 1..8), more in 0usize..100,
        ) {
            let tokens = wants.len() + more;
            let mut shares = vec![0; wants.len()];
            let all: Vec<usize> = (0..wants.len()).collect();
            let left = share_fairly(&prompts(&wants), &all, tokens, &mut shares);
            let most = shares.iter().max().copied().unwrap_or(0);
            prop_assert_eq!(shares.iter().sum::<usize>() + left, tokens);
            prop_assert!(left == 0 || shares == wants);
            prop_assert!(shares.iter().zip(&wants).all(|(share, want)| share == want || share + 1 >= most));
        }
    }
}
