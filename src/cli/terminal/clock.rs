//! Local time. Saved times are UTC; times for people are in the machine's time zone.

use jiff::Timestamp;
use jiff::tz::TimeZone;

use llmctl_template::DateTime;

/// Converts milliseconds since 1970, UTC, to local date and time; to UTC if the system has no time zone.
pub fn local_time(ms: u64) -> DateTime {
    in_zone(ms, &TimeZone::system())
}

fn in_zone(ms: u64, zone: &TimeZone) -> DateTime {
    let seconds = i64::try_from(ms / 1000).unwrap_or_default();
    let offset = Timestamp::from_second(seconds).map_or(0, |time| zone.to_offset(time).seconds());
    DateTime::from_unix(seconds.saturating_add(offset.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_that_of_the_zone_on_that_day() {
        let zone = TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").expect("a rule");
        let shown = |ms| in_zone(ms, &zone).strftime("%F %T");
        assert_eq!(shown(1_763_900_000_123), "2025-11-23 13:13:20", "winter");
        assert_eq!(shown(1_752_580_800_000), "2025-07-15 14:00:00", "summer");
        assert_eq!(in_zone(0, &TimeZone::UTC).strftime("%F %T"), "1970-01-01 00:00:00");
        assert_eq!(in_zone(u64::MAX, &zone).strftime("%F"), in_zone(u64::MAX, &TimeZone::UTC).strftime("%F"));
    }
}
