//! `run --batch`: rows of a JSON Lines file to results, one row at a time.
