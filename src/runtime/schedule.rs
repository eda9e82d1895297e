//! What the next step computes: a pure decision over plain numbers. Knows no sequence, page or model.
//!
//! Rules: every running generation gets its one row; what the budget leaves (at least one token, so that prompts never
//! starve) is shared among prompts by max-min fairness: equal shares, and what a short prompt does not need goes to the
//! longer ones. Requests are admitted in order of arrival; one that does not fit yet holds back those behind it, so that
//! a large request is not overtaken for ever. Pages are counted for the longest a request can become, so that one that
//! has started never has to be thrown out.

/// A request that waits for admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting {
    /// Prompt tokens to compute.
    pub prompt_left: usize,
    /// Pages it will hold at its longest.
    pub pages: usize,
}

/// A request that has been admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Running {
    /// Prompt tokens still to compute; 0 when it generates.
    pub prompt_left: usize,
}

/// What a step may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Rows of a step.
    pub tokens: usize,
    /// Requests running at once.
    pub running: usize,
    /// Pages not promised to anyone.
    pub pages: usize,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// How many of the waiting requests start, from the front.
    pub num_admitted: usize,
    /// Rows of each running request, then of each admitted one. A prompt may get 0 and then waits a step.
    pub rows: Vec<usize>,
}

/// Decides the next step. The same input gives the same plan.
pub fn plan_step(waiting: &[Waiting], running: &[Running], budget: Budget) -> StepPlan {
    let num_admitted = count_admitted(waiting, running.len(), budget);
    let started = waiting[..num_admitted].iter().map(|request| request.prompt_left);
    let prompt_left: Vec<usize> = running.iter().map(|request| request.prompt_left).chain(started).collect();
    let num_generating = prompt_left.iter().filter(|&&left| left == 0).count();
    let mut rows = share_fairly(&prompt_left, budget.tokens.saturating_sub(num_generating).max(1));
    for (rows, left) in rows.iter_mut().zip(&prompt_left) {
        if *left == 0 {
            *rows = 1;
        }
    }
    StepPlan { num_admitted, rows }
}

fn count_admitted(waiting: &[Waiting], num_running: usize, budget: Budget) -> usize {
    let places = budget.running.saturating_sub(num_running);
    let mut pages_left = budget.pages;
    let fits = |request: &&Waiting| match pages_left.checked_sub(request.pages) {
        Some(left) => {
            pages_left = left;
            true
        }
        None => false,
    };
    waiting.iter().take(places).take_while(fits).count()
}

/// Splits `budget` over `wants`: nobody gets more than it wants, and nobody less than another who wants as much,
/// but for the remainder of a division, which goes to the earlier ones.
fn share_fairly(wants: &[usize], budget: usize) -> Vec<usize> {
    let mut shares = vec![0; wants.len()];
    let mut order: Vec<usize> = (0..wants.len()).filter(|&index| wants[index] > 0).collect();
    order.sort_by_key(|&index| (wants[index], std::cmp::Reverse(index)));
    let mut left = budget;
    for (served, &index) in order.iter().enumerate() {
        shares[index] = wants[index].min(left / (order.len() - served));
        left -= shares[index];
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(waiting: &[(usize, usize)], running: &[usize], budget: (usize, usize, usize)) -> StepPlan {
        let waiting: Vec<_> =
            waiting.iter().map(|&(prompt_left, pages)| Waiting { prompt_left, pages }).collect();
        let running: Vec<_> = running.iter().map(|&prompt_left| Running { prompt_left }).collect();
        let (tokens, running_places, pages) = budget;
        plan_step(&waiting, &running, Budget { tokens, running: running_places, pages })
    }

    fn check(
        waiting: &[(usize, usize)],
        running: &[usize],
        budget: (usize, usize, usize),
        expected: (usize, &[usize]),
    ) {
        let plan = plan(waiting, running, budget);
        assert_eq!((plan.num_admitted, &plan.rows[..]), expected, "{waiting:?} {running:?} {budget:?}");
    }

    #[test]
    fn generations_get_one_row_each_and_prompts_share_the_rest() {
        check(&[], &[], (8, 4, 9), (0, &[]));
        check(&[], &[0, 0], (8, 4, 9), (0, &[1, 1]));
        check(&[], &[0, 100], (8, 4, 9), (0, &[1, 7]));
        check(&[], &[100, 100], (8, 4, 9), (0, &[4, 4]));
        check(&[], &[3, 100], (8, 4, 9), (0, &[3, 5]));
        check(&[], &[100, 3, 0], (8, 4, 9), (0, &[4, 3, 1]));
        check(&[(5, 1)], &[0], (8, 4, 9), (1, &[1, 5]));
    }

    #[test]
    fn the_remainder_of_a_split_goes_to_the_earlier() {
        check(&[], &[100, 100, 100], (8, 4, 9), (0, &[3, 3, 2]));
        check(&[], &[100, 100, 100], (2, 4, 9), (0, &[1, 1, 0]));
    }

    #[test]
    fn prompts_advance_even_when_generations_fill_the_budget() {
        check(&[], &[0, 0, 0, 50], (3, 8, 9), (0, &[1, 1, 1, 1]));
    }

    #[test]
    fn admission_is_in_order_and_bounded_by_places_and_pages() {
        check(&[(4, 2), (4, 2), (4, 2)], &[], (100, 2, 9), (2, &[4, 4]));
        check(&[(4, 5), (4, 5), (4, 1)], &[], (100, 8, 9), (1, &[4]));
        check(&[(4, 10)], &[0], (100, 8, 9), (0, &[1]));
        check(&[(4, 1)], &[0], (100, 1, 9), (0, &[1]));
    }

    proptest::proptest! {
        #[test]
        fn a_plan_stays_within_its_budget_and_always_makes_progress(
            waiting in proptest::collection::vec((1usize..300, 1usize..20), 0..6),
            running in proptest::collection::vec(0usize..300, 0..6),
            budget in (1usize..64, 1usize..8, 0usize..64),
        ) {
            let result = plan(&waiting, &running, budget);
            let (tokens, places, pages) = budget;
            let left: Vec<usize> =
                running.iter().copied().chain(waiting[..result.num_admitted].iter().map(|w| w.0)).collect();
            let num_generating = left.iter().filter(|&&left| left == 0).count();
            let prompt_rows = result.rows.iter().zip(&left).filter(|(_, left)| **left > 0);
            let num_prompt_rows: usize = prompt_rows.clone().map(|(rows, _)| *rows).sum();
            assert_eq!(result.rows.len(), left.len());
            assert!(prompt_rows.clone().all(|(rows, left)| rows <= left));
            assert!(num_prompt_rows <= tokens.saturating_sub(num_generating).max(1));
            assert!(left.is_empty() || result.rows.iter().sum::<usize>() > 0);
            assert!(result.num_admitted == 0 || running.len() + result.num_admitted <= places);
            assert!(waiting[..result.num_admitted].iter().map(|w| w.1).sum::<usize>() <= pages);
        }

        #[test]
        fn nobody_gets_two_rows_less_than_another_unless_it_wants_no_more(
            wants in proptest::collection::vec(1usize..50, 1..8), budget in 1usize..100,
        ) {
            let shares = share_fairly(&wants, budget);
            let most = shares.iter().max().copied().unwrap_or(0);
            assert_eq!(shares.iter().sum::<usize>(), budget.min(wants.iter().sum()));
            assert!(shares.iter().zip(&wants).all(|(share, want)| share == want || share + 1 >= most));
        }
    }
}
