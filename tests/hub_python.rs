//! Promise: huggingface_hub and llmctl read what the other one wrote. Needs an interpreter with huggingface_hub, named by
//! LLMCTL_TEST_PYTHON; without one the tests are skipped aloud.

use std::fs;

use crate::common::fake_hub::Access;
use crate::common::prelude::*;
use crate::hub_download::{Downloader, borrowed, content, tiny_checkpoint};

/// Runs a Python program with the cache and the hub of `user`; `None` (said on stderr) without huggingface_hub.
fn python(user: &Downloader, program: &str) -> Option<Ran> {
    let skip = |why: &str| {
        crate::common::skip(why);
        None
    };
    let Some(interpreter) = std::env::var_os("LLMCTL_TEST_PYTHON") else {
        return skip("LLMCTL_TEST_PYTHON names no interpreter");
    };
    let known = Command::new(&interpreter).args(["-c", "import huggingface_hub"]).output();
    if !known.is_ok_and(|known| known.status.success()) {
        return skip("the interpreter of LLMCTL_TEST_PYTHON has no huggingface_hub");
    }
    let mut command = Command::new(interpreter);
    command.args(["-c", program]).stdin(Stdio::null());
    command
        .env("HF_ENDPOINT", &user.hub.url)
        .env("HF_HUB_CACHE", user.cache())
        .env("HF_HUB_DISABLE_XET", "1");
    command.env("HF_HOME", user.place.path("hf_home")).env("HF_HUB_DISABLE_TELEMETRY", "1");
    command.env_remove("HF_TOKEN").env_remove("HF_HUB_OFFLINE").env("HF_HUB_DISABLE_PROGRESS_BARS", "1");
    Some(finish(command, ""))
}

const VERIFY: &str = "
import sys
from huggingface_hub.cli.hf import main
sys.argv = ['hf', 'cache', 'verify', 'org/tiny']
main()
";

#[test]
fn python_reads_what_llmctl_wrote() {
    let user = Downloader::new();
    let mut files = tiny_checkpoint();
    files.push(("additional_chat_templates/rag.jinja".to_owned(), b"{{ x }}".to_vec()));
    user.hub.publish("org/tiny", Access::Open, &borrowed(&files));
    user.run(&["pull", "org/tiny"]).check(0, "");
    user.hub.forget();
    let program = "
import os
from huggingface_hub import hf_hub_download, scan_cache_dir, snapshot_download, try_to_load_from_cache, get_cached_repo_tree
from huggingface_hub import _CACHED_NO_EXIST
path = hf_hub_download('org/tiny', 'model.safetensors')
assert os.path.islink(path), path
assert hf_hub_download('org/tiny', 'additional_chat_templates/rag.jinja', local_files_only=True)
assert snapshot_download('org/tiny', local_files_only=True, allow_patterns=['config.json', 'model.safetensors'])
assert try_to_load_from_cache('org/tiny', 'added_tokens.json') is _CACHED_NO_EXIST
assert 'config.json' in [file.path for file in get_cached_repo_tree('org/tiny')]
info = scan_cache_dir()
assert not info.warnings, info.warnings
repo, = info.repos
assert repo.repo_id == 'org/tiny' and repo.refs.keys() == {'main'}, repo
print(repo.nb_files)
";
    let Some(ran) = python(&user, program) else { return };
    ran.check(0, "");
    assert!(user.hub.transfers().is_empty(), "nothing was downloaded again: {:?}", user.hub.transfers());
    let verified = python(&user, VERIFY).expect("there is Python");
    verified.check(0, "");
}

#[test]
fn llmctl_reads_what_python_wrote() {
    let user = Downloader::new();
    let files = tiny_checkpoint();
    user.hub.publish("org/tiny", Access::Open, &borrowed(&files));
    let program = "
from huggingface_hub import snapshot_download
print(snapshot_download('org/tiny'))
";
    let Some(ran) = python(&user, program) else { return };
    ran.check(0, "");
    user.hub.forget();
    let run = ["run", "--offline", "--model", "org/tiny", "--raw", "Once", "--max-tokens", "2"];
    user.run(&run).check(0, "");
    let pulled = user.run(&["pull", "org/tiny"]);
    assert_eq!(pulled.check(0, "is here already").stdout, ran.stdout);
    assert!(user.hub.transfers().is_empty(), "{:?}", user.hub.transfers());
}

#[test]
fn each_leaves_the_others_partial_files_alone() {
    let user = Downloader::new();
    let weights = content(3_000_000, 5);
    user.hub.publish("org/tiny", Access::Open, &[("m-Q8_0.gguf", &weights), ("config.json", b"{}")]);
    let faults = crate::common::fake_hub::Faults { cuts: (1, 1_000_000), ..Default::default() };
    let blobs = user.in_repo("org/tiny", "blobs");
    fs::create_dir_all(&blobs).expect("mkdir");
    let hash = crate::common::fake_hub::sha256(&weights);
    let ours = blobs.join(format!("{hash}.llmctl.incomplete"));
    let theirs = blobs.join(format!("{hash}.0123abcd.incomplete"));
    fs::write(&ours, &weights[..1_000_000]).expect("write");
    fs::write(&theirs, b"junk").expect("write");
    user.hub.misbehave(faults);
    let Some(ran) =
        python(&user, "from huggingface_hub import *; print(hf_hub_download('org/tiny', 'm-Q8_0.gguf'))")
    else {
        return;
    };
    let path = ran.check(0, "").stdout.trim().to_owned();
    assert!(fs::read(&path).expect("the model") == weights);
    assert!(ours.exists(), "huggingface_hub leaves llmctl's partial file alone");
    fs::remove_file(blobs.join(&hash)).expect("removed");
    user.hub.misbehave(Default::default());
    user.run(&["pull", "org/tiny"]).check(0, "continuing after");
    assert!(fs::read(&path).expect("the model") == weights && theirs.exists());
    python(&user, VERIFY).expect("there is Python").check(0, "");
}
