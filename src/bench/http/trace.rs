//! Recorded arrivals: the Azure LLM inference traces (CSV) and Mooncake's (JSON Lines).
//!
//! Azure: `TIMESTAMP,ContextTokens,GeneratedTokens`, one request per line, times of a day in UTC
//! (<https://github.com/Azure/AzurePublicDataset>). Mooncake: `timestamp` in milliseconds, `input_length`,
//! `output_length`, and `hash_ids`, names of the prompt's blocks of 512 tokens: equal names are equal text
//! (Qin et al. 2024). Pure.

use serde_json::Value;

use crate::error::BenchError;

/// Tokens of the block of a `hash_id`.
pub const BLOCK_TOKENS: usize = 512;

/// One recorded request.
#[derive(Debug, Clone, PartialEq)]
pub struct Arrival {
    /// Seconds after the first.
    pub at_s: f64,
    pub prompt_tokens: usize,
    pub output_tokens: usize,
    /// Names of the prompt's blocks, if the trace has them.
    pub blocks: Vec<u64>,
}

/// Parses the first `most` requests of a trace, sorted by time.
///
/// # Errors
/// [`BenchError::Damaged`] naming the line.
pub fn parse(text: &str, most: usize) -> Result<Vec<Arrival>, BenchError> {
    let is_json = text.trim_start().starts_with('{');
    let mut arrivals = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        if arrivals.len() == most {
            break;
        }
        if !is_json
            && index == 0
            && line.trim_end().eq_ignore_ascii_case("TIMESTAMP,ContextTokens,GeneratedTokens")
        {
            continue;
        }
        let arrival = if is_json { mooncake(line) } else { azure(line) };
        let wrong = || {
            let forms = "neither a row of an Azure trace (TIMESTAMP,ContextTokens,GeneratedTokens) nor an object of a Mooncake trace";
            BenchError::Damaged(format!("line {}: {forms}", index + 1))
        };
        arrivals.push(arrival.ok_or_else(wrong)?);
    }
    arrivals.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    let first = arrivals.first().map_or(0.0, |arrival| arrival.at_s);
    arrivals.iter_mut().for_each(|arrival| arrival.at_s -= first);
    if arrivals.is_empty() {
        Err(BenchError::Damaged("the trace has no request".to_owned()))
    } else {
        Ok(arrivals)
    }
}

fn mooncake(line: &str) -> Option<Arrival> {
    let value: Value = serde_json::from_str(line).ok()?;
    let count = |name: &str| value[name].as_u64().and_then(|count| usize::try_from(count).ok());
    let blocks = value["hash_ids"].as_array().into_iter().flatten();
    Some(Arrival {
        at_s: value["timestamp"].as_f64()? / 1000.0,
        prompt_tokens: count("input_length")?,
        output_tokens: count("output_length")?,
        blocks: blocks.map(Value::as_u64).collect::<Option<_>>()?,
    })
}

fn azure(line: &str) -> Option<Arrival> {
    let mut cells = line.trim_end().split(',');
    let at_s = seconds(cells.next()?)?;
    let mut count = || cells.next()?.trim().parse().ok();
    Some(Arrival { at_s, prompt_tokens: count()?, output_tokens: count()?, blocks: Vec::new() })
}

/// Parses `2023-11-16 18:17:03.9799600` as seconds since 1970.
fn seconds(text: &str) -> Option<f64> {
    let (date, time) = text.trim().split_once([' ', 'T'])?;
    let numbers = |text: &str, by: char| text.split(by).map(str::parse).collect::<Result<Vec<f64>, _>>().ok();
    let (date, time) = (numbers(date, '-')?, numbers(time.trim_end_matches('Z'), ':')?);
    let (&[year, month, day], &[hours, minutes, seconds]) = (&date[..], &time[..]) else { return None };
    Some(((days(year, month, day) * 24.0 + hours) * 60.0 + minutes) * 60.0 + seconds)
}

/// Returns the days since 1970 of a Gregorian date. Years start in March, so that the leap day is the last.
fn days(year: f64, month: f64, day: f64) -> f64 {
    let (year, month) = if month > 2.0 { (year, month - 3.0) } else { (year - 1.0, month + 9.0) };
    let leap_days = (year / 4.0).floor() - (year / 100.0).floor() + (year / 400.0).floor();
    365.0 * year + leap_days + ((153.0 * month + 2.0) / 5.0).floor() + day - 1.0 - 719_468.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn azure_rows_cross_midnight() {
        let text = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
                    2024-02-28 23:59:59.5000000,374,44\n2024-02-29 00:00:01.0000000,396,109\n";
        let arrivals = parse(text, 10).expect("a trace");
        let found: Vec<_> = arrivals.iter().map(|a| (a.at_s, a.prompt_tokens, a.output_tokens)).collect();
        assert_eq!(found, [(0.0, 374, 44), (1.5, 396, 109)]);
        assert_eq!(seconds("1970-01-01 00:00:00"), Some(0.0));
        assert_eq!(seconds("2000-03-01T00:00:01Z"), Some(951_868_801.0));
    }

    #[test]
    fn mooncake_rows_name_their_blocks() {
        let text = "{\"timestamp\": 3000, \"input_length\": 700, \"output_length\": 5, \"hash_ids\": [0, 9]}\n\
                    {\"timestamp\": 1000, \"input_length\": 10, \"output_length\": 2, \"hash_ids\": [4]}\n";
        let arrivals = parse(text, 10).expect("a trace");
        assert_eq!(
            arrivals[1],
            Arrival { at_s: 2.0, prompt_tokens: 700, output_tokens: 5, blocks: vec![0, 9] }
        );
        assert_eq!(parse(text, 1).expect("a trace").len(), 1);
    }

    #[test]
    fn what_is_no_trace_is_named_by_its_line() {
        let check = |text: &str, message: &str| {
            let error = parse(text, 10).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        };
        check("", "no request");
        check("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2");
        check("{\"timestamp\": 1}\n", "line 1");
        check("2024-02-28 23:59:59,374\n", "line 1");
    }
}
