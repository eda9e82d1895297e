//! Civil time and `strftime`, for templates that print the date.
//!
//! A rendering gets its time handed in, so that it can be pinned and repeated. Times for people and for templates are in the
//! machine's time zone, as Python's `datetime.now()`; saved times are UTC.

use std::time::{SystemTime, UNIX_EPOCH};

use jiff::Timestamp;
use jiff::tz::TimeZone;

/// A date and time of day without a zone, as Python's naive `datetime`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DateTime {
    pub year: i64,
    /// 1 to 12.
    pub month: u8,
    /// 1 to 31.
    pub day: u8,
    pub hour: u8,
    pub minute: u8,
    pub second: u8,
}

impl Default for DateTime {
    fn default() -> Self {
        Self::from_unix(0)
    }
}

const MONTHS: &str = "January February March April May June July August September October November December";
const WEEKDAYS: &str = "Sunday Monday Tuesday Wednesday Thursday Friday Saturday";

impl DateTime {
    /// The system clock's time, as [`Self::local`].
    pub fn local_now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self::local(u64::try_from(since.as_millis()).unwrap_or(0))
    }

    /// From milliseconds since 1970, UTC, in the machine's time zone; in UTC if the system has none.
    pub fn local(ms: u64) -> Self {
        Self::in_zone(ms, &TimeZone::system())
    }

    fn in_zone(ms: u64, zone: &TimeZone) -> Self {
        let seconds = i64::try_from(ms / 1000).unwrap_or_default();
        let offset = Timestamp::from_second(seconds).map_or(0, |time| zone.to_offset(time).seconds());
        Self::from_unix(seconds.saturating_add(offset.into()))
    }

    /// From seconds since 1970-01-01 00:00 in UTC, to UTC.
    pub fn from_unix(seconds: i64) -> Self {
        let (days, rest) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
        // Days to civil date, with years that begin in March (Howard Hinnant, "chrono-compatible date algorithms").
        let z = days.clamp(-1_000_000_000, 1_000_000_000) + 719_468;
        let (era, day_of_era) = (z.div_euclid(146_097), z.rem_euclid(146_097));
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted = (5 * day_of_year + 2) / 153;
        let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
        Self {
            year: year_of_era + era * 400 + i64::from(month <= 2),
            month: month as u8,
            day: (day_of_year - (153 * shifted + 2) / 5 + 1) as u8,
            hour: (rest / 3600) as u8,
            minute: (rest / 60 % 60) as u8,
            second: (rest % 60) as u8,
        }
    }

    fn days_before(year: i64, month: u8) -> i64 {
        let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        let lengths = [31, if leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        lengths.iter().take(usize::from(month.saturating_sub(1))).sum()
    }

    /// Day of the year, from 1.
    fn yearday(&self) -> i64 {
        Self::days_before(self.year, self.month) + i64::from(self.day)
    }

    /// Day of the week, 0 is Sunday.
    fn weekday(&self) -> usize {
        let before = self.year - 1;
        let days = before * 365 + before.div_euclid(4) - before.div_euclid(100) + before.div_euclid(400);
        (days + self.yearday()).rem_euclid(7) as usize
    }

    /// Formats like C's `strftime` in the C locale, with glibc's `-` (no padding). An unknown directive stays as it
    /// is, which is what glibc does.
    pub fn strftime(&self, format: &str) -> String {
        let mut out = String::with_capacity(format.len() + 16);
        let mut rest = format.chars();
        while let Some(c) = rest.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut ahead = rest.clone();
            let mut directive = ahead.next();
            let unpadded = directive == Some('-');
            if unpadded {
                directive = ahead.next();
            }
            match directive.and_then(|directive| self.field(directive, unpadded)) {
                Some(field) => {
                    out.push_str(&field);
                    rest = ahead;
                }
                None => out.push('%'),
            }
        }
        out
    }

    fn field(&self, directive: char, unpadded: bool) -> Option<String> {
        let hour12 = (self.hour + 11) % 12 + 1;
        let number = |value: i64, width: usize| match unpadded {
            true => value.to_string(),
            false => format!("{value:0width$}"),
        };
        let month = MONTHS.split(' ').nth(usize::from(self.month).wrapping_sub(1)).unwrap_or("???");
        let weekday = WEEKDAYS.split(' ').nth(self.weekday()).unwrap_or("???");
        Some(match directive {
            'Y' => self.year.to_string(),
            'y' => number(self.year.rem_euclid(100), 2),
            'C' => number(self.year.div_euclid(100), 2),
            'm' => number(self.month.into(), 2),
            'd' => number(self.day.into(), 2),
            'e' if unpadded => self.day.to_string(),
            'e' => format!("{:2}", self.day),
            'H' => number(self.hour.into(), 2),
            'I' => number(hour12.into(), 2),
            'M' => number(self.minute.into(), 2),
            'S' => number(self.second.into(), 2),
            'f' => "000000".to_owned(),
            'j' => number(self.yearday(), 3),
            'w' => self.weekday().to_string(),
            'u' => ((self.weekday() + 6) % 7 + 1).to_string(),
            'U' => number((self.yearday() + 6 - self.weekday() as i64) / 7, 2),
            'W' => number((self.yearday() + 6 - (self.weekday() as i64 + 6) % 7) / 7, 2),
            'B' => month.to_owned(),
            'b' | 'h' => month[..3].to_owned(),
            'A' => weekday.to_owned(),
            'a' => weekday[..3].to_owned(),
            'p' => if self.hour < 12 { "AM" } else { "PM" }.to_owned(),
            'Z' | 'z' => String::new(),
            'F' => self.strftime("%Y-%m-%d"),
            'D' | 'x' => self.strftime("%m/%d/%y"),
            'T' | 'X' => self.strftime("%H:%M:%S"),
            'R' => self.strftime("%H:%M"),
            'r' => self.strftime("%I:%M:%S %p"),
            'c' => self.strftime("%a %b %e %H:%M:%S %Y"),
            'n' => "\n".to_owned(),
            't' => "\t".to_owned(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64, format: &str) -> String {
        DateTime::from_unix(seconds).strftime(format)
    }

    #[test]
    fn known_instants() {
        assert_eq!(at(0, "%F %T %A"), "1970-01-01 00:00:00 Thursday");
        assert_eq!(at(951_782_400, "%F %a %j"), "2000-02-29 Tue 060");
        assert_eq!(at(1_752_148_800, "%d %b %Y %H:%M"), "10 Jul 2025 12:00");
        assert_eq!(at(-1, "%c"), "Wed Dec 31 23:59:59 1969");
        assert_eq!(at(1_767_225_599, "%j %U %W %u %w"), "365 52 52 3 3");
    }

    #[test]
    fn a_time_is_that_of_the_zone_on_that_day() {
        let zone = TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").expect("a rule");
        let shown = |ms| DateTime::in_zone(ms, &zone).strftime("%F %T");
        assert_eq!(shown(1_763_900_000_123), "2025-11-23 13:13:20", "winter");
        assert_eq!(shown(1_752_580_800_000), "2025-07-15 14:00:00", "summer");
        assert_eq!(DateTime::in_zone(0, &TimeZone::UTC), DateTime::from_unix(0));
        let day = |zone| DateTime::in_zone(u64::MAX, zone).strftime("%F");
        assert_eq!(day(&zone), day(&TimeZone::UTC));
    }

    #[test]
    fn padding_and_unknown_directives() {
        assert_eq!(at(0, "%-d/%-m %I %p %%"), "1/1 12 AM %");
        assert_eq!(at(0, "%e|%Q|%|%-"), " 1|%Q|%|%-");
    }
}
