//! Names of servers and of their tools, as the model gets them: `server__tool`.
//!
//! Invariants: a name is 1 to 64 of a-z, A-Z, 0-9, _ and -; the first two underscores in a row end the
//! server's name, so that no server can offer a tool under the name of another's.

use std::collections::BTreeSet;

/// Stands between server and tool.
pub const SEPARATOR: &str = "__";

/// The state of a server that has ended or did not start.
pub const DOWN: &str = "does not run";

/// Most characters of a tool's name; OpenAI's limit.
const MAX_NAME: usize = 64;

/// Most characters of a server's name, so that there is room for the tool's.
const MAX_SERVER: usize = 32;

/// Returns a server's name as its tools' names begin: other characters become underscores, never two in a row or one at an end.
///
/// # Errors
/// That nothing of the name is left.
pub fn server_name(given: &str) -> Result<String, String> {
    let mut name = String::new();
    for c in given.chars() {
        match c {
            _ if c.is_ascii_alphanumeric() || c == '-' => name.push(c),
            _ if name.is_empty() || name.ends_with('_') => {}
            _ => name.push('_'),
        }
    }
    name.truncate(MAX_SERVER);
    let name = name.trim_end_matches('_').to_owned();
    match name.is_empty() {
        true => Err(format!("the server's name {given:?} has no letter or digit of ASCII")),
        false => Ok(name),
    }
}

/// Returns the names under which a server's tools are offered, in their order. A name that comes twice, after it is cut to what
/// models take, gets a number.
pub fn offered_names<'a>(server: &str, tools: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let mut taken = BTreeSet::new();
    let name = |tool: &str| {
        let is_kept = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        let tool: String = tool.chars().map(|c| if is_kept(c) { c } else { '_' }).collect();
        let whole = format!("{server}{SEPARATOR}{tool}");
        let numbered = (2..).map(|number| {
            let number = format!("_{number}");
            format!("{}{number}", &whole[..whole.len().min(MAX_NAME - number.len())])
        });
        let plain = whole[..whole.len().min(MAX_NAME)].to_owned();
        let free = std::iter::once(plain).chain(numbered).find(|name| !taken.contains(name));
        let free = free.expect("the numbers have no end");
        taken.insert(free.clone());
        free
    };
    tools.into_iter().map(name).collect()
}

/// Says why there is no tool of an offered name. `state` is what its server does instead of offering it, if there is such a server.
pub fn absence(offered: &str, state: Option<&str>) -> String {
    match (server_of(offered), state) {
        (Some(server), Some(state)) => format!("the server {server} {state}"),
        // A model or a client made it up: of any length.
        _ => format!("there is no tool {}", offered.chars().take(MAX_NAME).collect::<String>()),
    }
}

/// Returns the server's part of an offered name; `None` of a name that no server's tool can have.
pub fn server_of(offered: &str) -> Option<&str> {
    offered.split_once(SEPARATOR).map(|(server, _)| server)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_two_underscores_end_the_servers_name() {
        for (given, expected) in [
            ("files", "files"),
            ("my  server!", "my_server"),
            ("__a___b__", "a_b"),
            ("@scope/x-y.z", "scope_x-y_z"),
        ] {
            let name = server_name(given).expect(given);
            assert_eq!(name, expected);
            for tool in ["t", "_t", "__t", "b__t"] {
                let offered = offered_names(&name, [tool]);
                assert_eq!(server_of(&offered[0]), Some(expected), "{tool}");
            }
        }
        assert!(server_name("\u{e9}!").is_err());
        assert_eq!(server_name(&"s".repeat(40)).expect("cut").len(), MAX_SERVER);
    }

    #[test]
    fn a_tool_has_a_name_of_its_own_that_models_take() {
        let long = "t".repeat(80);
        let offered = offered_names("s", ["a.b", "a/b", "a_b", &long, &long]);
        assert_eq!(offered[..3], ["s__a_b", "s__a_b_2", "s__a_b_3"]);
        assert!(offered[3].len() == MAX_NAME && offered[4].len() == MAX_NAME && offered[4].ends_with("t_2"));
        assert_eq!(offered_names("s", [""]), ["s__"]);
    }
}
