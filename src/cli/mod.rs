//! Flags and the terminal live here and nowhere else.
