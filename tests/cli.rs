//! The command line as a user meets it: the real binary, its streams and its exit codes.
