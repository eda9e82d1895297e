//! Pages that another machine computed become those of a model here, if the model's weights are the same.

use std::io;
use std::path::Path;

use super::fingerprint::Fingerprint;
use crate::kv::disk::{ForeignPages, foreign_pages, forget_origin, take_over};

/// Moves imported pages below `root` to the fingerprint of a loaded model, if both have the same settings and the same weights,
/// byte by byte. Returns the number of pages.
///
/// `hashes` reads the model's files whole for their [`content_hashes`](super::content_hashes); it is called once, if there are
/// pages that only the modification times of weight files set apart.
///
/// # Errors
/// Errors of the file system.
pub fn adopt_pages(
    root: &Path,
    model: &Fingerprint,
    hashes: impl Fn() -> Option<Vec<String>>,
) -> io::Result<usize> {
    let (mut ours, mut num_moved) = (None, 0);
    for ForeignPages { fingerprint, facts, weights_sha256 } in foreign_pages(root) {
        let theirs = Fingerprint { hex: fingerprint, facts };
        if theirs.hex == model.hex {
            forget_origin(root, &theirs.hex)?;
        } else if theirs.is_same_but_times(model) {
            match ours.get_or_insert_with(&hashes) {
                Some(ours) if *ours == weights_sha256 => {
                    num_moved += take_over(root, &theirs.hex, (&model.hex, &model.facts))?;
                }
                // Else the weights are read whole at each start.
                Some(_) => forget_origin(root, &theirs.hex)?,
                None => {}
            }
        }
    }
    Ok(num_moved)
}
