//! One file from the hub to its blob: parts in parallel, in order to the disk, resumed and checked.
//!
//! Large files are requested in parts of a fixed size over several connections. The parts wait in memory for
//! their turn, at most `connections * part_bytes`, so the partial file grows without gaps and its hash runs
//! along.
//!
//! Invariant: bytes go to the partial file in order, from exactly its length on.

use std::collections::VecDeque;
use std::io::Read;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use ureq::Body;
use ureq::http::{HeaderMap, Response, header};

use super::client::{HubClient, RequestSubject, connection_failure};
use super::error::{AttemptFailure, HubError};
use super::listing::{RemoteFile, RemoteListing, encoded};
use super::observer::{PullEvent, PullObserver};
use super::partial::{PartialFile, hash_of};
use super::store::RepoStore;

/// Most bytes that a connection hands over at a time; with TLS it is a record of 16 KiB.
const PIECE_BYTES: usize = 64 << 10;

/// Bytes of a usual piece, by which the pieces that may wait are counted.
const USUAL_PIECE_BYTES: u64 = 16 << 10;

/// Bytes that must have come before failures count anew.
const LEAST_PROGRESS: u64 = 4 << 10;

/// Interval at which a download that receives nothing looks whether it is to stop.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Size limit in bytes of a file that is kept in memory.
const MAX_SMALL_BYTES: u64 = 64 << 20;

/// The address of a file at a commit, with what its answers must say.
#[derive(Debug, Clone)]
struct BlobRequest {
    url: String,
    repo: String,
    commit: String,
    file: RemoteFile,
}

impl BlobRequest {
    fn new(client: &HubClient, listing: &RemoteListing, file: &RemoteFile) -> Self {
        let repo = listing.renamed.as_ref().unwrap_or(&listing.repo);
        let path = format!("{repo}/resolve/{}/{}", listing.commit, encoded(&file.path, true));
        let (repo, commit) = (listing.repo.clone(), listing.commit.clone());
        Self { url: client.address(&path), repo, commit, file: file.clone() }
    }

    fn subject(&self) -> RequestSubject<'_> {
        RequestSubject { repo: &self.repo, revision: &self.commit, path: Some(&self.file.path) }
    }

    fn changed(&self, message: String) -> AttemptFailure {
        HubError::Changed { path: self.file.path.clone(), message }.into()
    }

    /// Requests bytes `first..end` and checks that the answer is about this file and these bytes.
    fn open(&self, client: &HubClient, first: u64, end: u64) -> Result<Response<Body>, AttemptFailure> {
        let is_all = first == 0 && end == self.file.size;
        let range = (!is_all).then(|| (first, (end < self.file.size).then(|| end - 1)));
        let answer = client.get(&self.url, self.subject(), range)?;
        self.check_facts(&answer.facts)?;
        let (status, headers) = (answer.response.status().as_u16(), answer.response.headers());
        let number = |name: header::HeaderName| headers.get(name)?.to_str().ok()?.trim().parse::<u64>().ok();
        match (status, is_all) {
            (200, true) => {
                let size = number(header::CONTENT_LENGTH).unwrap_or(self.file.size);
                self.check_size(size)?;
            }
            (200, false) => return Err(AttemptFailure::NoRanges),
            _ => {
                let text = headers.get(header::CONTENT_RANGE).and_then(|value| value.to_str().ok());
                let (begin, total) = text.and_then(content_range).unwrap_or((first, None));
                if begin != first {
                    return Err(AttemptFailure::NoRanges);
                }
                self.check_size(total.unwrap_or(self.file.size))?;
            }
        }
        Ok(answer.response)
    }

    fn check_size(&self, size: u64) -> Result<(), AttemptFailure> {
        match size == self.file.size {
            true => Ok(()),
            false => Err(self.changed(format!("{size} bytes instead of {}", self.file.size))),
        }
    }

    /// Compares the facts in the headers of the file with the listing.
    fn check_facts(&self, facts: &HeaderMap) -> Result<(), AttemptFailure> {
        let text =
            |name: &str| Some(facts.get(name)?.to_str().ok()?.trim_start_matches("W/").trim_matches('"'));
        if let Some(size) = text("x-linked-size").and_then(|size| size.parse().ok()) {
            self.check_size(size)?;
        }
        match text("x-linked-etag") {
            Some(hash) if hash != self.file.hash.hex() => {
                Err(self.changed(format!("its hash is {hash} instead of {}", self.file.hash.hex())))
            }
            _ => Ok(()),
        }
    }
}

/// Returns first byte and total size of `bytes 5-9/100`; the total may be unknown (`*`).
fn content_range(text: &str) -> Option<(u64, Option<u64>)> {
    let (range, total) = text.trim().strip_prefix("bytes")?.trim().split_once('/')?;
    Some((range.split_once('-')?.0.trim().parse().ok()?, total.trim().parse().ok()))
}

/// Downloads a small file into memory and checks its hash.
///
/// # Errors
/// As [`download`]; [`HubError::Unexpected`] for a file that is too large.
pub(super) fn small_file(
    client: &HubClient,
    listing: &RemoteListing,
    file: &RemoteFile,
    observer: &dyn PullObserver,
) -> Result<Vec<u8>, HubError> {
    let request = BlobRequest::new(client, listing, file);
    if file.size > MAX_SMALL_BYTES {
        let message = format!("the file has {} bytes, more than {MAX_SMALL_BYTES}", file.size);
        return Err(HubError::Unexpected { url: request.url, message });
    }
    let bytes = client.repeated(&request.url, observer, || {
        let response = request.open(client, 0, file.size)?;
        let body = response.into_body().into_with_config().limit(file.size + 1).read_to_vec();
        body.map_err(|error| connection_failure(&request.url, error))
    })?;
    let (expected, found) = (file.hash.hex().to_owned(), hash_of(file, &bytes));
    match found == expected {
        true => Ok(bytes),
        false => Err(HubError::WrongHash { path: file.path.clone(), expected, found }),
    }
}

/// Makes sure that the blob of `file` exists, over at most `connections` connections.
///
/// # Errors
/// Any [`HubError`]; the partial file is kept unless its bytes are wrong.
pub(super) fn download(
    client: &Arc<HubClient>,
    store: &RepoStore,
    listing: &RemoteListing,
    file: &RemoteFile,
    connections: usize,
    observer: &dyn PullObserver,
) -> Result<(), HubError> {
    let finished = |was_cached| observer.event(PullEvent::Finished { path: file.path.clone(), was_cached });
    if store.has(file) {
        finished(true);
        return Ok(());
    }
    let _lock = store.lock(file, observer)?;
    if store.has(file) {
        finished(true);
        return Ok(());
    }
    let mut is_second = false;
    loop {
        let partial = PartialFile::open(store.partial(file), file, observer)?;
        let resumed = partial.len();
        observer.event(PullEvent::Started { path: file.path.clone(), have: resumed, total: file.size });
        let request = BlobRequest::new(client, listing, file);
        let partial = Transfer::new(client, request, partial, connections, observer).run()?;
        match partial.finish(&store.blob(file)) {
            Ok(()) => break,
            // Bytes of an earlier run may be at fault: a machine that lost power can leave zeros.
            Err(HubError::WrongHash { .. }) if resumed > 0 && !is_second => {
                let why = "the bytes of an earlier download are damaged";
                observer.event(PullEvent::Restarted { path: file.path.clone(), why });
                is_second = true;
            }
            Err(error) => return Err(error),
        }
    }
    finished(false);
    Ok(())
}

/// Bytes `first..end` on their way.
struct Part {
    end: u64,
    pieces: Receiver<Result<Vec<u8>, AttemptFailure>>,
}

/// The transfer of one file into its partial file.
struct Transfer<'a> {
    client: &'a Arc<HubClient>,
    request: Arc<BlobRequest>,
    partial: PartialFile<'a>,
    observer: &'a dyn PullObserver,
    connections: usize,
    /// Parts in order; the first one begins at the partial file's length.
    parts: VecDeque<Part>,
    /// Offset of the part after the last one.
    next: u64,
    has_ranges: bool,
    num_failures: u32,
    /// The length that failures are counted from: neither bytes that are received again nor a few bytes for each connection
    /// are progress.
    reached: u64,
}

impl<'a> Transfer<'a> {
    fn new(
        client: &'a Arc<HubClient>,
        request: BlobRequest,
        partial: PartialFile<'a>,
        connections: usize,
        observer: &'a dyn PullObserver,
    ) -> Self {
        let (next, request) = (partial.len(), Arc::new(request));
        let (parts, has_ranges, num_failures) = (VecDeque::new(), true, 0);
        Self {
            client,
            request,
            connections,
            partial,
            observer,
            parts,
            next,
            has_ranges,
            num_failures,
            reached: next,
        }
    }

    /// Receives the rest of the file.
    fn run(mut self) -> Result<PartialFile<'a>, HubError> {
        while self.partial.len() < self.request.file.size {
            self.start_parts();
            let Some(part) = self.parts.front() else { break };
            if self.observer.is_cancelled() {
                return Err(HubError::Cancelled);
            }
            match part.pieces.recv_timeout(LOOK_EVERY) {
                Ok(Ok(piece)) => self.take(&piece)?,
                Ok(Err(failure)) => self.failed(failure)?,
                // The connection limits how long nothing may come.
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => self.failed(cut(&self.request.url))?,
            }
        }
        Ok(self.partial)
    }

    /// Opens connections as far as allowed. A file of less than two parts, and one from a server without ranges,
    /// comes in one.
    fn start_parts(&mut self) {
        let (size, part_bytes) = (self.request.file.size, self.client.settings().part_bytes);
        let is_parallel =
            self.has_ranges && self.connections > 1 && size - self.partial.len() >= 2 * part_bytes;
        let most = if is_parallel || !self.parts.is_empty() { self.connections } else { 1 };
        while self.next < size && self.parts.len() < most {
            let end = if is_parallel { size.min(self.next + part_bytes) } else { size };
            self.parts.push_back(self.part(self.next, end));
            self.next = end;
        }
    }

    fn part(&self, first: u64, end: u64) -> Part {
        let most_waiting = self.client.settings().part_bytes / USUAL_PIECE_BYTES + 1;
        let (sender, pieces) = sync_channel(usize::try_from(most_waiting).unwrap_or(usize::MAX));
        let (client, request, failed) = (Arc::clone(self.client), Arc::clone(&self.request), sender.clone());
        // Not joined: it ends when the file does not want its bytes any more, or with the connection's time limit.
        let reader = thread::Builder::new().name("download".to_owned());
        if let Err(error) = reader.spawn(move || send_pieces(&client, &request, first, end, &sender)) {
            let error = HubError::Unreachable { host: "no thread".to_owned(), message: error.to_string() };
            let _ = failed.send(Err(AttemptFailure::Final(error)));
        }
        Part { end, pieces }
    }

    fn take(&mut self, piece: &[u8]) -> Result<(), HubError> {
        let Some(part) = self.parts.front() else { return Ok(()) };
        if self.partial.len() + piece.len() as u64 > part.end {
            return Err(HubError::Changed {
                path: self.request.file.path.clone(),
                message: "it is longer than announced".to_owned(),
            });
        }
        self.partial.append(piece)?;
        let path = self.request.file.path.clone();
        self.observer.event(PullEvent::Received { path, bytes: piece.len() as u64 });
        if self.partial.len() >= self.reached + LEAST_PROGRESS {
            (self.reached, self.num_failures) = (self.partial.len(), 0);
        }
        if self.partial.len() == part.end {
            self.parts.pop_front();
        }
        Ok(())
    }

    /// Requests the rest of the first part again, after a pause, unless that cannot help.
    fn failed(&mut self, failure: AttemptFailure) -> Result<(), HubError> {
        let Some(part) = self.parts.pop_front() else { return Ok(()) };
        match failure {
            AttemptFailure::Final(error) => return Err(error),
            AttemptFailure::NoRanges if !self.has_ranges => {
                let message = "the answer has other bytes of the file than were asked for".to_owned();
                return Err(HubError::Unexpected { url: self.request.url.clone(), message });
            }
            AttemptFailure::NoRanges => {
                self.restart("the server sends no parts of files")?;
                self.has_ranges = false;
            }
            AttemptFailure::Transient { error, wait, .. } => {
                self.num_failures += 1;
                if self.num_failures >= self.client.settings().retry.attempts {
                    return Err(error);
                }
                let path = &self.request.file.path;
                self.client.wait_to_retry(path, &error, wait, self.num_failures, self.observer)?;
                if self.has_ranges {
                    let rest = self.part(self.partial.len(), part.end);
                    self.parts.push_front(rest);
                } else {
                    self.restart("the connection broke, and the server sends no parts of files")?;
                }
            }
        }
        Ok(())
    }

    fn restart(&mut self, why: &'static str) -> Result<(), HubError> {
        if self.partial.len() > 0 {
            self.observer.event(PullEvent::Restarted { path: self.request.file.path.clone(), why });
        }
        self.parts.clear();
        self.partial.restart()?;
        self.next = 0;
        Ok(())
    }
}

/// Sends the bytes `first..end` of the file, then nothing more; or the failure.
fn send_pieces(
    client: &HubClient,
    request: &BlobRequest,
    first: u64,
    end: u64,
    pieces: &SyncSender<Result<Vec<u8>, AttemptFailure>>,
) {
    let response = match request.open(client, first, end) {
        Ok(response) => response,
        Err(failure) => {
            let _ = pieces.send(Err(failure));
            return;
        }
    };
    let mut body = response.into_body().into_reader();
    let mut at = first;
    let mut buffer = vec![0; PIECE_BYTES];
    loop {
        let sent = match body.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => {
                at += count as u64;
                pieces.send(Ok(buffer[..count].to_vec()))
            }
            Err(error) => {
                let failure = connection_failure(&request.url, ureq::Error::from(error));
                let _ = pieces.send(Err(failure));
                return;
            }
        };
        if sent.is_err() {
            return;
        }
    }
    if at < end {
        let _ = pieces.send(Err(cut(&request.url)));
    }
}

fn cut(url: &str) -> AttemptFailure {
    let closed = std::io::Error::new(std::io::ErrorKind::UnexpectedEof, "the connection was closed early");
    connection_failure(url, ureq::Error::Io(closed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_answers() {
        assert_eq!(content_range("bytes 5-9/100"), Some((5, Some(100))));
        assert_eq!(content_range("bytes 5-9/*"), Some((5, None)));
        assert_eq!(content_range("pages 5-9/100"), None);
    }
}
