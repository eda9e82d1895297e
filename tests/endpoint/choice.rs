//! Promise: flags, variables, configuration files, sessions and `/model` choose the server and model that answer, and a key goes to its
//! server only.

use super::fake::{FakeServer, saying};
use super::{KEY, chat, configure, run};
use crate::cli::{Place, Ran, finish};

/// Runs with these variables.
fn run_with(place: &Place, variables: &[(&str, &str)], args: &[&str]) -> Ran {
    let mut command = place.command(&[&["run"], args].concat());
    command.envs(variables.iter().copied());
    finish(command, "")
}

/// Starts a fake whose model has this name.
fn fake_of(model: &str) -> FakeServer {
    FakeServer::with_models(&[(model, "x")], [])
}

#[test]
fn what_is_no_address_in_a_file_is_an_error() {
    let place = Place::new();
    for table in ["", "[run]\n", "[chat]\n"] {
        configure(&place, &format!("{table}endpoint = \"x\"\n"));
        place.run(&["run", "q"]).check(78, "endpoint");
    }
}

#[test]
fn a_configuration_of_run_and_chat_leaves_other_subcommands_alone() {
    let (place, fake) = (Place::new(), fake_of("tiny"));
    let settings = format!("endpoint = \"{}\"\nmodel = \"tiny\"\n", fake.url);
    configure(&place, &format!("[run]\n{settings}[chat]\n{settings}"));
    place.run(&["run", "q"]).check(0, "");
    assert_eq!(chat(&place, &["--ephemeral"], "q\n").check(0, "tiny").stdout, "done\n");
    assert_eq!(fake.asked().len(), 2);
    place.run(&["bench", "serve"]).check(2, "no server");
    let ran = place.run(&["launch", "claude", "--print"]);
    assert_ne!(ran.code, Some(78), "{ran:?}");
    // At the top they are for all subcommands, and `launch` takes one of them only.
    configure(&place, &settings);
    place.run(&["launch", "claude", "--print"]).check(78, "exclude each other");
}

#[test]
fn none_leaves_the_endpoint_of_a_configuration() {
    let (place, fake) = (Place::new(), fake_of("tiny"));
    configure(&place, &format!("endpoint = \"{}\"\n", fake.url));
    place.write("rows.jsonl", "{}\n");
    place.run(&["run", "--batch", "rows.jsonl"]).check(2, "--endpoint none");
    let here = ["-m", "guide", "--max-tokens", "1", "What is a session?"];
    place.run(&[&["run", "--endpoint", "none"], &here[..]].concat()).check(0, "");
    run_with(&place, &[("LLMCTL_ENDPOINT", "none")], &here).check(0, "");
    assert!(fake.asked().is_empty());
    place.run(&["run", "q"]).check(0, "");
    assert_eq!(fake.asked().len(), 1);
}

#[test]
fn a_model_that_is_named_in_the_chat_stays_when_a_session_is_loaded() {
    let (place, one, other) = (Place::new(), fake_of("a"), fake_of("b"));
    run(&place, &one, &["--session", "s", "first"]).check(0, "");
    let lines = format!("/model {}/v1#b\n/load s\nsecond\n", other.url);
    let ran = chat(&place, &["--endpoint", &one.url, "--session", "t"], &lines);
    ran.check(0, "session s: 1 turn");
    assert_eq!((one.asked().len(), other.asked().len()), (1, 1), "{}", ran.stderr);
    assert_eq!(other.asked()[0].messages().len(), 3);

    // A change that comes with a session is said.
    run(&place, &one, &["--session", "u", "first"]).check(0, "");
    let ran = chat(&place, &["--session", "s"], "/load u\nsecond\n");
    ran.check(0, &format!("model a at {}/v1, which session u continues with", one.url));
    assert_eq!(one.asked().len(), 3);
}

#[test]
fn a_key_from_a_variable_or_a_file_needs_an_endpoint() {
    let (place, fake) = (Place::new(), fake_of("tiny"));
    run(&place, &fake, &["--session", "s", "q"]).check(0, "");
    let of_variable = [("LLMCTL_ENDPOINT_KEY_ENV", "MY_KEY"), ("MY_KEY", KEY)];
    run_with(&place, &of_variable, &["--session", "s", "q"]).check(0, "");
    configure(&place, "endpoint-key-env = \"MY_KEY\"\n");
    run_with(&place, &of_variable[1..], &["--session", "s", "q"]).check(0, "");
    assert!(fake.asked().iter().all(|asked| asked.key.is_none()));
    let flags = ["--session", "s", "--endpoint-key-env", "MY_KEY", "q"];
    run_with(&place, &of_variable[1..], &flags).check(0, "");
    assert_eq!(fake.asked()[3].key.as_deref(), Some(KEY));
}

#[test]
fn a_key_that_may_not_list_models_can_ask_one() {
    let (place, fake) = (Place::new(), FakeServer::start([saying(&["yes"])]));
    fake.refuse_list(403);
    assert_eq!(run(&place, &fake, &["--model", "tiny", "q"]).check(0, "").stdout, "yes\n");
    run(&place, &fake, &["q"]).check(77, "(403)");
}
