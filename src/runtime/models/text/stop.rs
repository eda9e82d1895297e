//! Stop strings in streamed text, also across the borders of the pieces it comes in.
//!
//! The result is defined on the whole text, so that it cannot depend on how the text was cut: of all
//! occurrences of all stop strings the one that *starts* first wins; of several that start there, the
//! shortest (the text is the same, and it is complete first). Text from that start on is never returned.
//! Invariant: what is held back is always a proper prefix of a stop string, never more.
//!
//! ```text
//! stops: "abcd", "bc"    pushed so far: "xabc"    returned: "x"    held: "abc"
//! next "d": "abcd" starts at 1 -> hit             next "e" or end: "bc" starts at 2 -> "a" returned, then hit
//! ```

/// Looks for stop strings in a stream of text.
///
/// ```standalone_crate
/// use llmctl_models::text::StopMatcher;
///
/// let mut stop = StopMatcher::new(["END"]);
/// assert_eq!(stop.push("some text E"), "some text "); // "E" may begin a stop string
/// assert_eq!(stop.push("ND and more"), "");
/// assert_eq!(stop.hit(), Some("END"));
/// ```
#[derive(Debug, Clone, Default)]
pub struct StopMatcher {
    /// Non-empty strings.
    stops: Vec<String>,
    held: String,
    hit: Option<usize>,
}

/// Possible position of a stop string in the held text.
enum StopScan {
    /// A stop string (its index) starts at this byte.
    Stop(usize, usize),
    /// The text from this byte on may become a stop string.
    Candidate(usize),
    Nothing,
}

impl StopMatcher {
    /// Creates a matcher; empty stop strings are ignored.
    pub fn new<S: Into<String>>(stops: impl IntoIterator<Item = S>) -> Self {
        let stops = stops.into_iter().map(Into::into).filter(|stop: &String| !stop.is_empty());
        Self { stops: stops.collect(), ..Self::default() }
    }

    /// Appends text and returns what can no longer be part of a stop string. Returns nothing after a hit.
    pub fn push(&mut self, text: &str) -> String {
        if self.hit.is_some() {
            return String::new();
        }
        self.held.push_str(text);
        self.release(self.find(true))
    }

    /// Ends the stream and returns the held text. May find a hit too: a complete stop string that an earlier,
    /// now failed candidate overlapped.
    pub fn finish(&mut self) -> String {
        if self.hit.is_some() {
            return String::new();
        }
        self.release(self.find(false))
    }

    /// Returns the stop string that ended the text.
    pub fn hit(&self) -> Option<&str> {
        self.hit.map(|index| self.stops[index].as_str())
    }

    /// Returns the held text, always a proper prefix of a stop string.
    pub fn held(&self) -> &str {
        &self.held
    }

    fn find(&self, more_may_come: bool) -> StopScan {
        for (start, _) in self.held.char_indices() {
            let rest = &self.held[start..];
            let complete = self.stops.iter().enumerate().filter(|(_, stop)| rest.starts_with(stop.as_str()));
            if let Some((index, _)) = complete.min_by_key(|(_, stop)| stop.len()) {
                return StopScan::Stop(start, index);
            }
            if more_may_come && self.stops.iter().any(|stop| stop.starts_with(rest)) {
                return StopScan::Candidate(start);
            }
        }
        StopScan::Nothing
    }

    fn release(&mut self, found: StopScan) -> String {
        match found {
            StopScan::Nothing => std::mem::take(&mut self.held),
            StopScan::Candidate(start) => self.held.drain(..start).collect(),
            StopScan::Stop(start, index) => {
                self.hit = Some(index);
                let mut text = std::mem::take(&mut self.held);
                text.truncate(start);
                text
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition, on the whole text: (visible text, stop string).
    fn reference(text: &str, stops: &[String]) -> (String, Option<String>) {
        let found = stops.iter().filter(|stop| !stop.is_empty());
        let found = found.filter_map(|stop| text.find(stop.as_str()).map(|start| (start, stop.len(), stop)));
        match found.min() {
            Some((start, _, stop)) => (text[..start].to_owned(), Some(stop.clone())),
            None => (text.to_owned(), None),
        }
    }

    /// Returns the shortest tail to hold after `seen`: from the first position where a stop string may still
    /// start.
    fn tail_needed(seen: &str, stops: &[String]) -> String {
        let may_start =
            |rest: &str| stops.iter().any(|stop| stop.len() > rest.len() && stop.starts_with(rest));
        let tail = seen.char_indices().map(|(start, _)| &seen[start..]).find(|rest| may_start(rest));
        tail.unwrap_or_default().to_owned()
    }

    fn run<'a>(pieces: impl IntoIterator<Item = &'a str>, stops: &[String]) -> (String, Option<String>) {
        let mut matcher = StopMatcher::new(stops.iter().cloned());
        let mut text: String = pieces.into_iter().map(|piece| matcher.push(piece)).collect();
        text.push_str(&matcher.finish());
        (text, matcher.hit().map(str::to_owned))
    }

    fn split_at_cuts<'a>(text: &'a str, cuts: &[prop::sample::Index]) -> Vec<&'a str> {
        let borders: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| borders[cut.index(borders.len())]).collect();
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
    }

    // Few letters, so that stop strings overlap each other and themselves often.
    fn stop_strings() -> impl Strategy<Value = Vec<String>> {
        prop::collection::vec("[abé]{0,4}", 0..4)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1024))]

        #[test]
        fn any_split_equals_the_whole(text in "[abéx]{0,24}", stops in stop_strings(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..16)) {
            let expected = reference(&text, &stops);
            prop_assert_eq!(run([text.as_str()], &stops), expected.clone());
            prop_assert_eq!(run(split_at_cuts(&text, &cuts), &stops), expected);
        }

        #[test]
        fn no_more_is_held_than_needed(text in "[abéx]{0,24}", stops in stop_strings()) {
            let mut matcher = StopMatcher::new(stops.iter().cloned());
            let (mut seen, mut returned) = (String::new(), String::new());
            for c in text.chars() {
                seen.push(c);
                returned.push_str(&matcher.push(c.encode_utf8(&mut [0; 4])));
                if matcher.hit().is_some() {
                    prop_assert_eq!(&returned, &reference(&seen, &stops).0);
                    break;
                }
                let tail = tail_needed(&seen, &stops);
                prop_assert_eq!(matcher.held(), &tail);
                prop_assert_eq!(format!("{returned}{tail}"), seen.clone());
            }
        }
    }

    #[test]
    fn only_a_tail_that_can_become_a_stop_is_held() {
        let mut matcher = StopMatcher::new(["</answer>"]);
        assert_eq!(matcher.push("a < b"), "a < b", "a space cannot follow '<' in the stop string");
        assert_eq!(matcher.push(" </ans"), " ");
        assert_eq!(matcher.push("wering"), "</answering");
        assert_eq!(matcher.push("</answer"), "");
        assert_eq!(matcher.push("> more"), "");
        assert_eq!(matcher.hit(), Some("</answer>"));
        assert_eq!(matcher.push("after"), "");
        assert_eq!(matcher.finish(), "");
    }

    #[test]
    fn the_stop_that_starts_first_wins() {
        let stops = ["abcd".to_owned(), "bc".to_owned()];
        assert_eq!(run(["xabc", "d"], &stops), ("x".to_owned(), Some("abcd".to_owned())));
        assert_eq!(run(["xabc", "e"], &stops), ("xa".to_owned(), Some("bc".to_owned())));
        assert_eq!(run(["xabc"], &stops), ("xa".to_owned(), Some("bc".to_owned())));
    }

    #[test]
    fn empty_stops_are_ignored_and_held_text_is_flushed() {
        assert_eq!(run(["abc"], &[String::new()]), ("abc".to_owned(), None));
        assert_eq!(run(["one\n"], &["\n\n".to_owned()]), ("one\n".to_owned(), None));
    }
}
