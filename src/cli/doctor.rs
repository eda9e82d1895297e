//! `llmctl doctor`: the state of this machine as llmctl sees it, and warnings.
//!
//! Collects [`DoctorFact`]s first and prints them after, so that text and JSON agree. Repairs nothing. To
//! test whether a folder is writable it writes a small file and removes it.

use std::io::IsTerminal;
use std::path::Path;

use clap::{Args, Command};
use serde_json::{Value, json};

use super::CommandContext;
use super::config::Config;
use super::error::{CommandError, Exit};
use super::places::{KeptFiles, Places, free_bytes};
use super::terminal::colors_wanted;
use crate::cli::config::{config_cmd, variables};
use crate::cli::flags::args::{ColorWhen, INSTRUCTION_SETS};
use crate::cli::model::models::find;
use crate::cli::model::sight;
use crate::cli::sessions::encryption;
use crate::cli::terminal::report::{ReportFormat, bytes, columns, counted, print, print_json};
use crate::cli::terminal::slow_cpu::slow_kernels;
use llmctl_base::machine;
use llmctl_base::machine::Cores;
use llmctl_hub::Resolved;
use llmctl_models::kv::disk::{WarmPrompt, pinned_bytes};
use llmctl_models::load::{
    DeviceKind, ImageUse, Isa, KeptPanels, device_memory, kept_panels, kernels_name, open_device,
};
use llmctl_models::memory;

/// Check the machine, the configuration and the folders, and warn of problems
#[derive(Debug, Clone, Args)]
pub struct DoctorArgs {
    /// Format of stdout: a table, or one JSON object
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t)]
    pub output: ReportFormat,
}

/// Free bytes below which there is a warning: enough for a conversation of hours, and KV of its last turns.
const LITTLE_SPACE: u64 = 64 << 20;

/// A finding: a word or number for programs, a phrase for people.
struct DoctorFact {
    section: &'static str,
    name: &'static str,
    value: Value,
    text: String,
    warning: Option<String>,
}

impl DoctorFact {
    fn new(
        section: &'static str,
        name: &'static str,
        value: impl Into<Value>,
        text: impl Into<String>,
    ) -> Self {
        Self { section, name, value: value.into(), text: text.into(), warning: None }
    }

    fn warn(mut self, warning: Option<String>) -> Self {
        self.warning = warning;
        self
    }
}

pub fn run(args: DoctorArgs, context: CommandContext<'_>) -> Result<Exit, CommandError> {
    let CommandContext { config, places, definition: command, .. } = context;
    // Errors of variables and files are reported among the configuration's facts.
    let in_force = |key: &str| config_cmd::value_of(key, context).ok().flatten();
    let model = in_force("model");
    let mut facts = build_facts();
    facts.extend(machine_facts(Path::new("/")));
    facts.extend(gpu_facts());
    facts.push(kernels_fact(in_force("cpu").as_deref()));
    facts.extend(thread_facts(Cores::here(), in_force("threads"), in_force("threads-batch")));
    facts.extend(memory_facts(Path::new("/")));
    facts.extend(config_facts(config, places));
    facts.push(variables_fact(command));
    facts.extend(folder_facts(places));
    facts.push(keys_fact(encryption::folder(), places));
    facts.extend(places.packed().map(|folder| packed_fact(&folder, places)));
    facts.extend(places.kv().map(|root| warm_fact(&root)));
    facts.extend(model_facts(config, model.as_deref(), places));
    facts.extend(terminal_facts());
    match args.output {
        ReportFormat::Text => print(&text(&facts)),
        ReportFormat::Json => print_json(&to_json(&facts)),
    }
}

fn build_facts() -> Vec<DoctorFact> {
    let version = env!("CARGO_PKG_VERSION");
    // Set by the release recipe; a plain `cargo build` does not know it.
    let commit = option_env!("LLMCTL_COMMIT");
    let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
    let slow = cfg!(debug_assertions).then(|| "this is a debug build, many times slower".to_owned());
    let target = format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS);
    let devices: Vec<&str> =
        [("cpu", true), ("cuda", cfg!(feature = "cuda")), ("metal", cfg!(feature = "metal"))]
            .iter()
            .filter(|(_, built)| *built)
            .map(|(name, _)| *name)
            .collect();
    vec![
        DoctorFact::new("build", "version", version, version),
        DoctorFact::new("build", "commit", commit, commit.unwrap_or("not recorded in this build")),
        DoctorFact::new("build", "target", target.clone(), target),
        DoctorFact::new("build", "profile", profile, profile).warn(slow),
        DoctorFact::new("build", "devices", devices.clone(), devices.join(", ")),
    ]
}

/// Opens the GPUs that this build supports, as `--device auto` does.
fn gpu_facts() -> Vec<DoctorFact> {
    let kinds = [
        ("cuda", cfg!(feature = "cuda"), DeviceKind::Cuda(0)),
        ("metal", cfg!(feature = "metal"), DeviceKind::Metal(0)),
    ];
    let fact = |name: &'static str, opened: Result<Option<[u64; 2]>, String>| match opened {
        Ok(memory) => {
            let memory = memory.map(|[total, free]| format!(", {} of {} free", bytes(free), bytes(total)));
            DoctorFact::new("gpu", name, true, format!("device 0 answers{}", memory.unwrap_or_default()))
        }
        Err(error) => DoctorFact::new("gpu", name, false, "no device")
            .warn(Some(format!("no {name} device opens ({error}): models run on the CPU"))),
    };
    let open = |kind| open_device(kind).and_then(|device| device_memory(&device));
    let open = |kind| open(kind).map_err(|error| error.to_string());
    kinds.into_iter().filter(|(_, built, _)| *built).map(|(name, _, kind)| fact(name, open(kind))).collect()
}

fn machine_facts(root: &Path) -> Vec<DoctorFact> {
    let model = machine::cpu_model(root);
    let features = machine::cpu_features();
    let names = |available: bool| -> Vec<&str> {
        features.iter().filter(|f| f.available == available).map(|f| f.name).collect()
    };
    let (has, lacks) = (names(true), names(false));
    let lacking = if lacks.is_empty() { String::new() } else { format!(" (not {})", lacks.join(", ")) };
    let quota = machine::cpu_quota(root);
    let throttled = quota.filter(|quota| *quota < 1.0).map(|quota| {
        format!("the cgroup allows {quota:.2} CPUs: generation stands still while the quota is used up")
    });
    vec![
        DoctorFact::new("cpu", "model", model.clone(), model.unwrap_or_else(|| "unknown".to_owned())),
        DoctorFact::new("cpu", "features", has.clone(), has.join(", ") + &lacking),
        DoctorFact::new(
            "cpu",
            "quota",
            quota,
            quota.map_or("none".to_owned(), |quota| format!("{quota:.2} CPUs")),
        )
        .warn(throttled),
    ]
}

/// Returns the kernels that `llmctl run` uses with the configured `--cpu`.
fn kernels_fact(forced: Option<&str>) -> DoctorFact {
    let available: Vec<_> = Isa::available().collect();
    let names: Vec<_> = available.iter().map(|isa| isa.name()).collect();
    let list = names.join(", ");
    let best = *available.last().expect("the scalar set is always there");
    let (isa, why, refused) = match forced
        .map(|name| (name, INSTRUCTION_SETS.iter().find(|set| set.0 == name)))
    {
        None => (best, format!("the best of {list}"), None),
        Some((name, set)) => match set.map(|set| set.1).filter(|isa| available.contains(isa)) {
            Some(isa) => (isa, format!("forced; there are {list}"), None),
            None => {
                (best, list.clone(), Some(format!("{name} is forced, which is refused: there are {list}")))
            }
        },
    };
    let (name, kernels) = (isa.name(), kernels_name(isa));
    let value = json!({"instruction_set": name, "products": kernels, "available": names});
    let text = format!("{name}, products by {kernels} ({why})");
    DoctorFact::new("cpu", "kernels", value, text).warn(refused.or_else(|| slow_kernels(isa)))
}

/// Returns the cores by kind, the numbers of threads, and why they are the default.
fn thread_facts(cores: &Cores, threads: Option<String>, threads_batch: Option<String>) -> [DoctorFact; 3] {
    let set = |text: Option<String>| text.and_then(|text| text.parse::<usize>().ok());
    let given = |threads| (threads, "--threads".to_owned());
    let (threads, why) = set(threads).map_or_else(|| (cores.threads(), cores.reason()), given);
    let (batch, batch_why) =
        set(threads_batch).map_or((threads, "as threads"), |threads| (threads, "--threads-batch"));
    let allowed = |threads: usize| {
        (threads > cores.allowed)
            .then(|| format!("{threads} threads on {} CPUs get into each other's way", cores.allowed))
    };
    [
        cores_fact(cores),
        DoctorFact::new("cpu", "threads", threads, format!("{threads} ({why})")).warn(allowed(threads)),
        DoctorFact::new("cpu", "threads_batch", batch, format!("{batch} ({batch_why})")).warn(allowed(batch)),
    ]
}

fn cores_fact(cores: &Cores) -> DoctorFact {
    let Cores { online, allowed, physical, performance, ref nodes, caches, .. } = *cores;
    let nodes = nodes.len().max(1);
    let value = json!({
        "online": online, "allowed": allowed, "physical": physical, "performance": performance, "nodes": nodes,
        "last_level_caches": caches,
    });
    let kinds = if performance < physical { format!(", {performance} of them fast") } else { String::new() };
    let of = if allowed < online { format!(" of {online}") } else { String::new() };
    let spread = if nodes > 1 { " with the weights spread over them" } else { "" };
    let count = |count: usize, name: &str| format!("{count} {name}{}", if count == 1 { "" } else { "s" });
    let text = format!(
        "{}{kinds} ({allowed}{of} CPUs, {}{spread}, {})",
        count(physical, "core"),
        count(nodes, "memory node"),
        count(caches, "last-level cache")
    );
    DoctorFact::new("cpu", "cores", value, text)
}

fn memory_facts(root: &Path) -> Vec<DoctorFact> {
    let limits = memory::memory_limits(root);
    let Some(limit) = memory::tightest(&limits) else {
        let warning =
            "the memory available cannot be read: a model that is too big is not refused".to_owned();
        return vec![DoctorFact::new("memory", "available", Value::Null, "unknown").warn(Some(warning))];
    };
    let source = limit.source.display().to_string();
    let little = (limit.available < 1 << 30).then(|| "little memory is left for a model".to_owned());
    vec![
        DoctorFact::new("memory", "available", limit.available, bytes(limit.available)).warn(little),
        DoctorFact::new("memory", "total", limit.total, bytes(limit.total)),
        DoctorFact::new("memory", "limited_by", source.clone(), source),
    ]
}

fn config_facts(config: &Config, places: &Places) -> Vec<DoctorFact> {
    let found = config.looked().iter().map(|looked| {
        let state = if looked.exists { "" } else { " (not there)" };
        let text = format!("{}{state}", places.shorten(&looked.path));
        DoctorFact::new(
            "config",
            looked.role.name(),
            json!({"path": looked.path, "exists": looked.exists}),
            text,
        )
    });
    let mut facts: Vec<DoctorFact> = found.collect();
    let problem = config.check().err().map(|error| error.to_string());
    let state = if problem.is_some() { "broken" } else { "ok" };
    facts.push(DoctorFact::new("config", "state", state, state).warn(problem));
    facts
}

/// Returns the set variables of flags.
fn variables_fact(command: &Command) -> DoctorFact {
    let (names, wrong) = variables::survey(command);
    let warnings: Vec<String> = wrong.into_iter().chain(variables::unknown(command)).collect();
    let warning = warnings.join("; ");
    let names: Vec<String> = names.into_iter().collect();
    let text = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    DoctorFact::new("config", "variables", names, text)
        .warn(Some(warning).filter(|warning| !warning.is_empty()))
}

/// Checks that llmctl's folders are private and have room.
fn folder_facts(places: &Places) -> Vec<DoctorFact> {
    let folders = [
        ("data", &places.data, KeptFiles::Sessions),
        ("state", &places.state, KeptFiles::History),
        ("cache", &places.cache, KeptFiles::Kv),
    ];
    folders
        .into_iter()
        .map(|(name, folder, kept)| match folder {
            Some(path) => folder_fact(name, path, places.check(kept).err(), places),
            None => DoctorFact::new("folders", name, Value::Null, "unknown")
                .warn(Some("neither HOME nor the XDG variables say where it is".to_owned())),
        })
        .collect()
}

/// Returns where the keys of `--encrypt` lie; copies of the folder that has the sessions should not have them too.
fn keys_fact(keys: Option<&Path>, places: &Places) -> DoctorFact {
    let inside = |keys: &Path| places.data.as_ref().is_some_and(|data| keys.starts_with(data));
    let warning = keys.filter(|keys| inside(keys)).map(|keys| {
        format!("{} lies in the data folder: a copy of the sessions has their keys too", places.shorten(keys))
    });
    let text = keys
        .map_or("none: sessions are saved in plain text (--encrypt)".to_owned(), |keys| places.shorten(keys));
    DoctorFact::new("folders", "keys", json!(keys), text).warn(warning)
}

/// Counts the packed weights that are kept.
fn packed_fact(folder: &Path, places: &Places) -> DoctorFact {
    let KeptPanels { files, bytes: size } = kept_panels(folder);
    let models = if files == 1 { "model" } else { "models" };
    let text = format!("{} ({files} {models}, {})", places.shorten(folder), bytes(size));
    DoctorFact::new(
        "folders",
        "packed_weights",
        json!({"path": folder, "models": files, "bytes": size}),
        text,
    )
}

/// Counts the prompts that were computed ahead.
fn warm_fact(root: &Path) -> DoctorFact {
    let (prompts, faults) = WarmPrompt::read_all(root);
    let hits: u64 = prompts.iter().map(|prompt| prompt.num_hits(root)).sum();
    let size = pinned_bytes(root).unwrap_or(0);
    let text = match prompts.len() {
        0 => "none (`llmctl warm`)".to_owned(),
        count => {
            format!("{} ({} of KV, {})", counted(count, "prompt"), bytes(size), counted(hits as usize, "hit"))
        }
    };
    let sizes = WarmPrompt::bytes_on_disk(&prompts, root).unwrap_or_default();
    let lost = prompts.iter().zip(sizes).find(|(_, size)| size.is_none()).map(|(prompt, _)| {
        format!("the KV of {:?} is not on disk: `llmctl warm` computes it again", prompt.name)
    });
    let value = json!({"prompts": prompts.len(), "bytes": size, "hits": hits});
    DoctorFact::new("folders", "warm_prompts", value, text).warn(faults.into_iter().next().or(lost))
}

/// Describes a folder. `obstacle` is the reason why it cannot be written.
fn folder_fact(
    name: &'static str,
    path: &Path,
    obstacle: Option<CommandError>,
    places: &Places,
) -> DoctorFact {
    let shown = places.shorten(path);
    let (exists, mode, free) = (path.exists(), mode(path), free_bytes(path));
    let warning = if exists && !path.is_dir() {
        Some(format!("{shown} is not a folder"))
    } else if let Some(obstacle) = &obstacle {
        Some(obstacle.to_string())
    } else if let Some(little) = free.filter(|free| *free < LITTLE_SPACE) {
        Some(format!("{shown}: only {} of disk space are left", bytes(little)))
    } else {
        let open = mode.filter(|mode| mode & 0o077 != 0);
        open.map(|mode| format!("{shown} has mode {mode:04o} and will hold private text: chmod 700 {shown}"))
    };
    let mut notes = Vec::new();
    notes.extend((!exists).then(|| "not created yet".to_owned()));
    notes.extend(mode.map(|mode| format!("mode {mode:04o}")));
    notes.extend(free.map(|free| format!("{} free", bytes(free))));
    let text = if notes.is_empty() { shown } else { format!("{shown} ({})", notes.join(", ")) };
    let value = json!({
        "path": path, "exists": exists, "writable": obstacle.is_none(), "mode": mode, "free_bytes": free,
    });
    DoctorFact::new("folders", name, value, text).warn(warning)
}

#[cfg(unix)]
fn mode(path: &Path) -> Option<u32> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).ok().map(|meta| meta.permissions().mode() & 0o7777)
}

#[cfg(not(unix))]
fn mode(_path: &Path) -> Option<u32> {
    None
}

fn model_facts(config: &Config, model: Option<&str>, places: &Places) -> Vec<DoctorFact> {
    let cached = llmctl_hub::list(places.hub.as_deref());
    let incomplete: Vec<&str> =
        cached.iter().filter(|model| model.missing.is_some()).map(|model| model.reference.as_str()).collect();
    let damaged = (!incomplete.is_empty()).then(|| format!("parts are missing of {}", incomplete.join(", ")));
    let shown = places.hub.as_deref().map_or("unknown".to_owned(), |path| places.shorten(path));
    let aliases = config.aliases();
    let broken: Vec<String> = aliases
        .keys()
        .filter_map(|name| find(name, places, &aliases).err().map(|error| format!("alias {name}: {error}")))
        .collect();
    let mut facts = vec![
        DoctorFact::new("models", "hub_cache", json!(places.hub), shown),
        DoctorFact::new("models", "cached", cached.len(), cached.len().to_string()).warn(damaged),
        DoctorFact::new("models", "aliases", aliases.len(), aliases.len().to_string())
            .warn((!broken.is_empty()).then(|| broken.join("; "))),
    ];
    if let Some(model) = model {
        let found = find(model, places, &aliases);
        let missing = found.as_ref().err().map(ToString::to_string);
        facts.push(DoctorFact::new("models", "default", model, model).warn(missing));
        facts.extend(found.ok().map(|resolved| sight_fact(&resolved)));
    }
    facts
}

fn sight_fact(resolved: &Resolved) -> DoctorFact {
    let seen = sight::sight(resolved, ImageUse::default());
    DoctorFact::new("models", "reads_images", sight::json(&seen), sight::words(&seen))
        .warn(sight::problem(&seen))
}

fn terminal_facts() -> Vec<DoctorFact> {
    let kind = |is_terminal: bool| if is_terminal { "terminal" } else { "not a terminal" };
    let (stdout, stderr) = (std::io::stdout().is_terminal(), std::io::stderr().is_terminal());
    let size = crossterm::terminal::size().ok().filter(|_| stdout || stderr);
    let colors = colors_wanted(ColorWhen::Auto, stderr, |name| std::env::var(name).ok());
    let size_text = size.map_or("unknown".to_owned(), |(width, height)| format!("{width}x{height}"));
    vec![
        DoctorFact::new("terminal", "stdout", stdout, kind(stdout)),
        DoctorFact::new("terminal", "stderr", stderr, kind(stderr)),
        DoctorFact::new("terminal", "size", json!(size), size_text),
        DoctorFact::new("terminal", "colors", colors, if colors { "yes" } else { "no" }),
    ]
}

fn text(facts: &[DoctorFact]) -> String {
    let mut rows = Vec::new();
    let mut section = "";
    for fact in facts {
        let heading = if fact.section == section { String::new() } else { fact.section.to_owned() };
        section = fact.section;
        rows.push(vec![heading, fact.name.replace('_', " "), fact.text.clone()]);
    }
    let warnings: Vec<String> = facts
        .iter()
        .filter_map(|fact| {
            Some(format!("warning: {} {}: {}\n", fact.section, fact.name, fact.warning.as_ref()?))
        })
        .collect();
    let verdict = if warnings.is_empty() { "no problems found\n".to_owned() } else { warnings.concat() };
    format!("{}\n{verdict}", columns(&rows))
}

fn to_json(facts: &[DoctorFact]) -> Value {
    let mut object = json!({"schema": "llmctl.doctor.v1"});
    for fact in facts {
        object[fact.section][fact.name] = fact.value.clone();
    }
    let warning = |fact: &DoctorFact| {
        let message = fact.warning.as_ref()?;
        Some(json!({"section": fact.section, "name": fact.name, "message": message}))
    };
    object["warnings"] = facts.iter().filter_map(warning).collect();
    object
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::cli::error::Kind;
    use crate::cli::places::probe;

    #[test]
    fn text_and_json_say_the_same() {
        let facts = [
            DoctorFact::new("cpu", "threads", 4, "4"),
            DoctorFact::new("cpu", "model", Value::Null, "unknown").warn(Some("cannot tell".to_owned())),
            DoctorFact::new("memory", "limited_by", "/x", "/x"),
        ];
        assert_eq!(
            text(&facts),
            "cpu     threads     4\n        model       unknown\nmemory  limited by  /x\n\n\
             warning: cpu model: cannot tell\n"
        );
        let json = to_json(&facts);
        assert_eq!(json["cpu"], json!({"threads": 4, "model": null}));
        assert_eq!(json["warnings"][0]["message"], "cannot tell");
    }

    #[cfg(unix)]
    #[test]
    fn folders_are_judged() {
        use std::os::unix::fs::PermissionsExt;
        let home = tempfile::tempdir().expect("tempdir");
        let folder = home.path().join("data");
        let places = Places::default();
        let fact = |folder: &Path| {
            folder_fact("data", folder, probe(folder).err().map(|e| CommandError::new(Kind::Io, e)), &places)
        };
        let new = fact(&folder);
        assert!(new.warning.is_none(), "a missing folder is made when needed");
        assert!(new.text.contains("not created yet") && new.value["writable"] == true, "{}", new.text);
        fs::create_dir(&folder).expect("mkdir");
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).expect("chmod");
        assert!(fact(&folder).warning.is_none());
        assert_eq!(fs::read_dir(&folder).expect("readable").count(), 0, "the probe is gone");
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).expect("chmod");
        let warning = fact(&folder).warning.expect("a warning");
        assert!(warning.contains("0755") && warning.contains("chmod 700"), "{warning}");
        let file = home.path().join("file");
        fs::write(&file, "").expect("write");
        assert!(fact(&file).warning.expect("a warning").contains("not a folder"));
    }

    #[test]
    fn a_folder_that_cannot_be_written_to_is_a_warning() {
        let home = tempfile::tempdir().expect("tempdir");
        let file = home.path().join("file");
        fs::write(&file, "").expect("write");
        let places = Places { data: Some(file.join("llmctl")), ..Places::default() };
        let facts = folder_facts(&places);
        let warning = facts[0].warning.as_deref().expect("a warning");
        assert!(warning.contains("sessions cannot be saved"), "{warning}");
        assert_eq!(facts[0].value["writable"], false);
    }

    #[test]
    fn packed_weights_are_counted() {
        let folder = tempfile::tempdir().expect("tempdir");
        fs::write(folder.path().join("0a.panels"), [0; 3000]).expect("write");
        fs::write(folder.path().join("0b.part"), [0; 96]).expect("write");
        let fact = packed_fact(folder.path(), &Places::default());
        assert_eq!((&fact.value["models"], &fact.value["bytes"]), (&json!(1), &json!(3096)));
        assert!(fact.text.contains("(1 model, "), "{}", fact.text);
    }

    #[test]
    fn unknown_memory_is_a_warning() {
        let empty = tempfile::tempdir().expect("tempdir");
        let facts = memory_facts(empty.path());
        assert!(facts.len() == 1 && facts[0].warning.is_some());
        assert_eq!(machine_facts(empty.path())[2].text, "none");
    }

    #[test]
    fn threads_are_shown_with_the_cores_and_the_reason() {
        let nodes = [0].into();
        let mut cores =
            Cores { online: 40, allowed: 20, physical: 14, performance: 6, nodes, caches: 2, quota: None };
        let [shown, threads, _] = thread_facts(&cores, None, None);
        assert_eq!(
            shown.text,
            "14 cores, 6 of them fast (20 of 40 CPUs, 1 memory node, 2 last-level caches)"
        );
        assert_eq!(shown.value["performance"], 6);
        let reason = "the performance cores of 14 cores; the affinity mask allows 20 of 40 CPUs";
        assert!(threads.text == format!("6 ({reason})") && threads.warning.is_none(), "{}", threads.text);
        let [_, threads, batch] = thread_facts(&cores, Some("20".to_owned()), None);
        assert_eq!((threads.text.as_str(), batch.text.as_str()), ("20 (--threads)", "20 (as threads)"));
        assert!(threads.warning.is_none(), "as many as CPUs");
        let [.., batch] = thread_facts(&cores, None, Some("21".to_owned()));
        assert!(batch.text == "21 (--threads-batch)" && batch.warning.is_some());
        cores.nodes = [0, 1].into();
        let [shown, ..] = thread_facts(&cores, None, None);
        assert!(
            shown.text.contains(", 2 memory nodes with the weights spread over them, "),
            "{}",
            shown.text
        );
    }

    #[test]
    fn forced_kernels_are_shown_or_warned_of() {
        let fact = kernels_fact(Some("scalar"));
        assert_eq!(
            (&fact.value["instruction_set"], &fact.value["products"]),
            (&json!("scalar"), &json!("scalar"))
        );
        assert!(fact.warning.expect("slow").contains("prompts take") && fact.text.contains("forced"));
        assert!(kernels_fact(Some("mmx")).warning.expect("a warning").contains("scalar"));
        assert!(kernels_fact(None).text.contains("the best of scalar"));
    }
}
