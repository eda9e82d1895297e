//! Formats of answers as enums whose rows are constants: each variant is one row of one table.

/// An unknown format name, with the known ones.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} `{name}` (known: {})", known.join(", "))]
pub struct UnknownFormat {
    pub what: &'static str,
    pub name: String,
    pub known: &'static [&'static str],
}

/// An enum of formats: per row a variant and its constant, which has a member `name`. The order of the rows is the order in
/// which a template's signs are looked for, so that markers of one format alone stand before those that several share.
macro_rules! formats {
    ($(#[$attribute:meta])* $type:ident, $what:literal, $record:ty, [$($(#[$doc:meta])* $variant:ident => $row:path,)*]) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $type {
            $($(#[$doc])* $variant,)*
        }

        impl $type {
            /// Every format, in the order in which an error lists them.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// Returns the record of this format.
            pub(crate) fn row(self) -> &'static $record {
                match self { $(Self::$variant => &$row),* }
            }

            /// The word for flags and reports.
            pub fn name(self) -> &'static str {
                self.row().name
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::named::UnknownFormat;

            fn from_str(name: &str) -> Result<Self, Self::Err> {
                Self::ALL.iter().copied().find(|format| format.name() == name).ok_or_else(|| {
                    $crate::named::UnknownFormat {
                        what: $what,
                        name: name.to_owned(),
                        known: &[$($row.name),*],
                    }
                })
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}
pub(super) use formats;
