//! Running servers of this user: a record of each, by which `--connect` finds it.
//!
//! `$XDG_STATE_HOME/llmctl/servers/PID.json` has the address and the models, without keys. The server holds a
//! lock on it as long as it lives, however it ends, so that a record without a lock is stale and is removed
//! by whoever finds it.
//!
//! Invariants: only the owner can read a record; a server is used only for the same file, unchanged since the
//! server began, and with the same settings that decide on bits.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::models;
use crate::cli::flags::args::{DeviceArg, LoraFile, ModelArgs};
use crate::cli::places::Places;
use crate::cli::terminal::Terminal;
use llmctl_base::private_files::{private_file, private_folder};
use llmctl_hub::builtin::GUIDE;
use llmctl_hub::{ModelSource, Resolved};
use llmctl_models::load::model_facts;
use llmctl_serve::front::listen::Address;

/// Folder of the records, in the state folder.
const FOLDER: &str = "servers";

/// A record is small; more than this is something else.
const MAX_RECORD_BYTES: u64 = 4 << 20;

/// The record of a running server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ServerRecord {
    pid: u32,
    address: String,
    models: Vec<RecordedModel>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct RecordedModel {
    /// The name in requests.
    id: String,
    /// The same for the same bits.
    identity: String,
}

/// A server that has the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundServer {
    pub url: String,
    /// The name of the model there.
    pub model: String,
}

impl FoundServer {
    /// Returns the flags of a model that this server computes. What decides on bits is the same there.
    pub fn flags(&self, args: &ModelArgs) -> ModelArgs {
        let mut args =
            ModelArgs { dtype: None, quantize: None, kv_type: None, draft_model: None, ..args.clone() };
        args.remote.engine = self.url.parse().ok().into_iter().collect();
        args.remote.connected_model = Some(self.model.clone());
        args
    }
}

/// The record of this process; dropping it removes the file.
pub struct RecordFile {
    path: PathBuf,
    /// Holds the lock.
    _file: File,
}

impl Drop for RecordFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path); // one that stays has no lock, and is removed by who finds it
    }
}

/// Writes the record of a server that takes requests; `None`, with a notice, if that is not possible. `context` is that of its only
/// model, which memory may have cut. `served` are the models: their names in requests, if they have other ones there, and their
/// references, where `None` is the model inside llmctl.
pub fn record(
    args: &ModelArgs,
    context: Option<usize>,
    served: Vec<(Option<String>, Option<String>)>,
    address: &Address,
    places: &Places,
    terminal: &Terminal,
) -> Option<RecordFile> {
    if !args.remote.engine.is_empty() {
        return None; // whoever wants that engine names it
    }
    let args = &ModelArgs { ctx: context.or(args.ctx), ..args.clone() };
    let folder = places.state.as_ref()?.join(FOLDER);
    let models = served.into_iter().filter_map(|(id, reference)| model_record(args, id, reference, places));
    let record =
        ServerRecord { pid: std::process::id(), address: reachable(address), models: models.collect() };
    write(&folder, &record)
        .map_err(|error| terminal.detail(&format!("--connect will not find this server: {error}")))
        .ok()
}

fn model_record(
    args: &ModelArgs,
    id: Option<String>,
    reference: Option<String>,
    places: &Places,
) -> Option<RecordedModel> {
    let resolved = match reference {
        Some(reference) => models::look_up(&reference, places, &args.aliases).ok()?,
        None => Resolved::built_in(&GUIDE),
    };
    let identity = identity(args, &resolved).ok()?;
    Some(RecordedModel { id: id.unwrap_or(resolved.name), identity })
}

/// Returns the address for clients on this machine.
fn reachable(address: &Address) -> String {
    match address {
        Address::Tcp(address) if address.ip().is_unspecified() => {
            let local: IpAddr = match address.ip() {
                IpAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
                IpAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
            };
            format!("http://{}", std::net::SocketAddr::new(local, address.port()))
        }
        other => other.to_string(),
    }
}

fn write(folder: &Path, record: &ServerRecord) -> io::Result<RecordFile> {
    private_folder(folder, true)?;
    let path = folder.join(format!("{}.json", record.pid));
    // The file gets its name with its lock, or another process would take it for stale.
    let unnamed = path.with_extension("new");
    let mut file = private_file(OpenOptions::new().write(true).create(true).truncate(true), &unnamed)?;
    file.try_lock()?;
    file.write_all(serde_json::to_string(record)?.as_bytes())?;
    fs::rename(&unnamed, &path)?;
    Ok(RecordFile { path, _file: file })
}

/// Returns a hash of a model's file, or of the files of its folder, by place, size and time, with the settings that decide on answers
/// as they are in force: a flag that says the default is none.
fn identity(args: &ModelArgs, resolved: &Resolved) -> io::Result<String> {
    let mut hash = Sha256::new();
    let facts = model_facts(&resolved.source).and_then(|facts| facts.decoder);
    let context = args.ctx.or(facts.ok().map(|facts| facts.context_length));
    let (kv_type, ends) = (args.kv_type.unwrap_or_default(), BTreeSet::from_iter(&args.eos_id));
    hash.update(format!("{:?} {:?} {kv_type:?} {context:?} {ends:?}\n", args.dtype, args.quantize));
    hash.update(format!("{:?}\n", device(args, cfg!(any(feature = "cuda", feature = "metal")))));
    for LoraFile(adapter) in &args.lora {
        hash.update(format!("{}\n", adapter.scale));
        hash_files(&mut hash, &adapter.path)?;
    }
    let path = resolved.source.path();
    if matches!(resolved.source, ModelSource::BuiltIn(_)) {
        hash.update(format!("{} {}", path.display(), env!("CARGO_PKG_VERSION")));
    } else {
        hash_files(&mut hash, path)?;
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Returns the device that is asked for; without support for a GPU there is one.
fn device(args: &ModelArgs, has_gpu: bool) -> DeviceArg {
    if has_gpu { args.device.unwrap_or_default() } else { DeviceArg::Cpu }
}

fn hash_files(hash: &mut Sha256, path: &Path) -> io::Result<()> {
    let path = fs::canonicalize(path)?;
    let mut files = vec![path.clone()];
    if path.is_dir() {
        files = fs::read_dir(&path)?.filter_map(Result::ok).map(|entry| entry.path()).collect();
        files.retain(|file| file.is_file());
        files.sort();
    }
    for file in files {
        let metadata = fs::metadata(&file)?;
        let modified = metadata.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        hash.update(format!("{} {} {modified}\n", file.display(), metadata.len()));
    }
    Ok(())
}

/// Finds a running server that has the model with the same settings. Removes stale records on the way.
///
/// # Errors
/// Why there is none.
pub fn find(args: &ModelArgs, resolved: &Resolved, places: &Places) -> Result<FoundServer, String> {
    let folder = places.state.as_ref().map(|state| state.join(FOLDER));
    let entries = folder.as_deref().and_then(|folder| fs::read_dir(folder).ok());
    let mut paths: Vec<PathBuf> =
        entries.into_iter().flatten().filter_map(Result::ok).map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    paths.sort();
    let running: Vec<ServerRecord> = paths.iter().filter_map(|path| read(path)).collect();
    if running.is_empty() {
        return Err("no server of yours is running".to_owned());
    }
    let identity = identity(args, resolved).map_err(|error| error.to_string())?;
    let model_of = |record: &ServerRecord| {
        let model = record.models.iter().find(|model| model.identity == identity)?;
        Some(FoundServer { url: record.address.clone(), model: model.id.clone() })
    };
    let found: Vec<FoundServer> = running.iter().filter_map(model_of).collect();
    match found.iter().find(|server| server.url.starts_with("http")) {
        Some(server) => Ok(server.clone()),
        None => Err(match found.first() {
            Some(local) => format!("the server at {} listens on no port, which --connect needs", local.url),
            None => format!("no running server has {} with these settings", resolved.name),
        }),
    }
}

/// Reads the record of a server that runs; removes one that is stale.
fn read(path: &Path) -> Option<ServerRecord> {
    let file = File::open(path).ok()?;
    if file.try_lock_shared().is_ok() {
        let _ = fs::remove_file(path); // another process may have been quicker
        return None;
    }
    let mut text = String::new();
    io::Read::read_to_string(&mut io::Read::take(file, MAX_RECORD_BYTES), &mut text).ok()?;
    serde_json::from_str(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::flags::args::ColorWhen;

    fn model(folder: &Path) -> Resolved {
        let path = folder.join("a.gguf");
        fs::write(&path, "weights").expect("a file");
        Resolved::new("a".to_owned(), ModelSource::Gguf(path))
    }

    #[test]
    fn a_server_is_found_while_it_lives_and_has_the_same_model() {
        let folder = tempfile::tempdir().expect("a folder");
        let places = Places { state: Some(folder.path().to_owned()), ..Places::default() };
        let (args, model) = (ModelArgs::default(), model(folder.path()));
        let why = |args: &ModelArgs| find(args, &model, &places).err().unwrap_or_default();
        assert_eq!(why(&args), "no server of yours is running");
        let models =
            vec![RecordedModel { id: "a".to_owned(), identity: identity(&args, &model).expect("a file") }];
        let record = ServerRecord { pid: 7, address: "http://127.0.0.1:1".to_owned(), models };
        let file = write(&folder.path().join(FOLDER), &record).expect("a record");
        let found = find(&args, &model, &places);
        assert_eq!(
            found.map(|server| (server.url, server.model)),
            Ok((record.address.clone(), "a".to_owned()))
        );
        let other = ModelArgs { kv_type: Some(llmctl_models::load::KvType::F32), ..ModelArgs::default() };
        assert_eq!(why(&other), "no running server has a with these settings");
        fs::write(folder.path().join("a.gguf"), "other weights").expect("a file");
        assert_eq!(why(&args), "no running server has a with these settings", "the file has changed");
        drop(file);
        assert_eq!(why(&args), "no server of yours is running");
    }

    #[test]
    fn settings_count_as_they_are_in_force() {
        use llmctl_models::load::KvType;
        let folder = tempfile::tempdir().expect("a folder");
        let model = model(folder.path());
        fs::write(folder.path().join("tone.gguf"), "an adapter").expect("a file");
        let of = |args: ModelArgs| identity(&args, &model).expect("files");
        let lora = |scale: &str| {
            let file = format!("{}={scale}", folder.path().join("tone.gguf").display());
            ModelArgs { lora: vec![file.parse().expect("an adapter")], ..ModelArgs::default() }
        };
        let ends = |eos_id: &[u32]| ModelArgs { eos_id: eos_id.to_vec(), ..ModelArgs::default() };
        let kv = |kv_type| ModelArgs { kv_type: Some(kv_type), ..ModelArgs::default() };
        let short = ModelArgs { ctx: Some(512), ..ModelArgs::default() };
        let plain = of(ModelArgs::default());
        assert_eq!(plain, of(kv(KvType::F16)), "the default");
        assert_eq!(of(ends(&[2, 1, 2])), of(ends(&[1, 2])), "the same tokens end answers");
        let all = [plain, of(kv(KvType::Q8_0)), of(ends(&[1])), of(short), of(lora("1")), of(lora("0.5"))];
        assert_eq!(BTreeSet::from_iter(&all).len(), all.len(), "{all:?}");
        let on = |device| ModelArgs { device: Some(device), ..ModelArgs::default() };
        assert_ne!(device(&on(DeviceArg::Cuda), true), device(&on(DeviceArg::Cpu), true));
        assert_eq!(device(&ModelArgs::default(), false), device(&on(DeviceArg::Cpu), false), "the only one");
        let guide = Resolved::built_in(&GUIDE);
        let of = |ctx| identity(&ModelArgs { ctx, ..ModelArgs::default() }, &guide).expect("a model");
        let own = model_facts(&guide.source).and_then(|facts| facts.decoder).expect("facts").context_length;
        assert_eq!(of(None), of(Some(own)));
        assert_ne!(of(None), of(Some(own / 2)));
    }

    #[test]
    fn a_server_with_a_cut_context_has_that_one_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let places = Places { state: Some(folder.path().to_owned()), ..Places::default() };
        let (terminal, guide) = (Terminal::new(ColorWhen::Never, 0, true), Resolved::built_in(&GUIDE));
        let address = Address::Tcp("127.0.0.1:80".parse().expect("an address"));
        let args = ModelArgs::default();
        let found = |ctx| find(&ModelArgs { ctx, ..args.clone() }, &guide, &places).is_ok();
        for (context, expected) in [(Some(256), [false, true]), (None, [true, false])] {
            let record = record(&args, context, vec![(None, None)], &address, &places, &terminal);
            assert!(record.is_some());
            assert_eq!([None, Some(256)].map(found), expected, "{context:?}");
        }
    }

    #[test]
    fn a_stale_record_is_removed_and_a_socket_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let places = Places { state: Some(folder.path().to_owned()), ..Places::default() };
        let (args, model) = (ModelArgs::default(), model(folder.path()));
        let models =
            vec![RecordedModel { id: "a".to_owned(), identity: identity(&args, &model).expect("a file") }];
        let record = ServerRecord { pid: 7, address: "unix:/run/s".to_owned(), models };
        let records = folder.path().join(FOLDER);
        let file = write(&records, &record).expect("a record");
        let why = find(&args, &model, &places).err().unwrap_or_default();
        assert!(why.contains("unix:/run/s listens on no port"), "{why}");
        fs::write(records.join("8.json"), serde_json::to_string(&record).expect("JSON")).expect("a file");
        assert!(find(&args, &model, &places).is_err());
        assert!(!records.join("8.json").exists() && records.join("7.json").exists());
        drop(file);
    }

    #[test]
    fn an_address_for_all_is_reached_here() {
        let address = |text: &str| reachable(&Address::Tcp(text.parse().expect("an address")));
        assert_eq!(address("0.0.0.0:80"), "http://127.0.0.1:80");
        assert_eq!(address("[::]:80"), "http://[::1]:80");
        assert_eq!(address("10.0.0.1:80"), "http://10.0.0.1:80");
    }
}
