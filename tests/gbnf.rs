//! Promise: a grammar in llama.cpp's notation is translated to Lark that llguidance keeps exactly: it takes each text of the
//! grammar, byte by byte, and no other. What cannot be translated is refused with its rule and line.

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::ApproximateTokEnv;
use llguidance::{Matcher, ParserFactory};
use llmctl_base::error::GrammarError;
use llmctl_engine::GrammarSource;
use llmctl_engine::grammar::gbnf_to_lark as to_lark;

fn is_gbnf(text: &str) -> bool {
    matches!(GrammarSource::grammar(text.to_owned()), GrammarSource::Gbnf(_))
}

/// A vocabulary of 256 tokens, of which one is `<think>`.
fn find_token(name: &str) -> Option<u32> {
    let id = name.strip_prefix("<[").and_then(|rest| rest.strip_suffix("]>"));
    id.map_or((name == "<think>").then_some(7), |id| id.parse().ok().filter(|id| *id < 256))
}

fn lark(gbnf: &str) -> String {
    to_lark(gbnf, &find_token).unwrap_or_else(|error| panic!("{gbnf}\n{error}"))
}

/// Returns for each text whether llguidance takes it under the translation, from the first byte to the last.
fn taken(gbnf: &str, texts: &[&str]) -> Vec<bool> {
    let factory = ParserFactory::new_simple(&ApproximateTokEnv::single_byte_env()).expect("a factory");
    let lark = lark(gbnf);
    let parser = factory.create_parser(TopLevelGrammar::from_lark(lark.clone()));
    let matcher = Matcher::new(parser);
    assert!(!matcher.is_error(), "{lark}\n{:?}", matcher.get_error());
    let take = |text: &&str| {
        let mut matcher = matcher.deep_clone();
        let takes = |byte: u8| matcher.try_consume_tokens(&[u32::from(byte)]).is_ok_and(|count| count == 1);
        text.bytes().all(takes) && matcher.is_accepting().unwrap_or(false)
    };
    texts.iter().map(take).collect()
}

fn check(gbnf: &str, good: &[&str], bad: &[&str]) {
    for (texts, expected) in [(good, true), (bad, false)] {
        for (text, taken) in texts.iter().zip(taken(gbnf, texts)) {
            assert_eq!(taken, expected, "{text:?}\n{gbnf}\n{}", lark(gbnf));
        }
    }
}

#[test]
fn literals_classes_and_escapes_are_characters() {
    check(r#"root ::= "a\x41\u00e9\U0001F600\n\"\\""#, &["aAé😀\n\"\\"], &["aAé😀\n\"", "aaé😀\n\"\\"]);
    check(r"root ::= [a-cx\-\]\u00e9]+ [^\n-]", &["abx-]é!", "cé"], &["d!", "a\n", "a-", "a"]);
    check("root ::= [-+*/] [a-]", &["-a", "/-", "+a"], &["-b", "a-"]);
    check("root ::= . [^a]", &["\nb", "é漢"], &["ba", "b", "bcd"]);
    check(r"root ::= [\x00-\U0010FFFF] [\uD000-\uE000]", &["x\u{d001}", "漢\u{e000}"], &["x\u{e001}", "x"]);
    check(r#"root ::= "" "a" []"#, &["a"], &["", "b"]);
}

#[test]
fn repetitions_groups_and_alternatives() {
    check(
        "root ::= \"ab\"{2,3} \"c\"{2} \"d\"{1,} \"e\"{0,1}",
        &["ababccd", "abababccdde"],
        &["abccd", "ababcccd", "ababcc"],
    );
    check("root ::= ( \"a\" | \"b\" [0-9]? )* \"!\"", &["!", "ab1b!", "aaa!"], &["b12!", "a"]);
    check("root ::= \"a\"**", &["", "aaa"], &["b"]);
    check("root ::= | \"a\" |", &["", "a"], &["aa"]);
    check(
        "root ::= (\n  \"a\" # one\n\n  \"b\"\n) |\n  \"c\"\n  | \"d\"\r\n# end",
        &["ab", "c", "d"],
        &["a", "abc"],
    );
    check("root ::= \"a\"{ 2 , 4 }", &["aa", "aaaa"], &["a", "aaaaa"]);
    check("root ::= \"a\"{0,5000} \"b\"", &["b", &("a".repeat(5000) + "b")], &[&("a".repeat(5001) + "b")]);
}

#[test]
fn rules_may_recur_from_both_sides() {
    let list = "root ::= root \",\" item | item\nitem ::= [a-z]+";
    check(list, &["a", "ab,c,d"], &["", ",a", "a,"]);
    let nested = "root ::= \"(\" root? \")\" | under_score\nunder_score ::= \"x\"";
    check(nested, &["x", "()", "(((x)))"], &["((x)", "(xx)"]);
    check("root ::= a\na ::= \"a\" b | \"c\"\nb ::= \"b\" a", &["c", "abc", "ababc"], &["ab", "abab"]);
    check("root ::= ws \"x\"\nws ::= ([ \\t] ws)?", &["x", " \t x"], &["", " "]);
    check("root ::= \"x\" ws\nws ::= | \" \" ws | \"\\n\" ws", &["x", "x \n\n "], &["x!"]);
    check("root ::= \"a\"\nroot ::= \"b\"", &["b"], &["a"]);
}

/// llguidance takes the longest lexeme: what follows must not be lost.
#[test]
fn what_a_longer_lexeme_would_take_is_left_to_the_next() {
    let recurring = |body: &str| format!("root ::= \"(\" root \")\" | {body}");
    check(&recurring("[a-z]+ \"end\""), &["xend", "endend", "(aend)"], &["end", "xen"]);
    check(
        &recurring("\"ab\" \"c\" | \"abc\" \"d\" | \"a\" \"bcde\""),
        &["abc", "(abcd)", "abcde"],
        &["ab", "abcdd"],
    );
    check(&recurring("word \"ly\" | word\nword ::= [a-z]{2,}"), &["quickly", "only", "ly", "(lyly)"], &["y"]);
    check(&recurring("[0-9]+ [0-9] \".\""), &["10.", "(123.)"], &["1."]);
    check(&recurring("[é-ê]* \"è\" [é]?"), &["è", "éêè", "èé", "(éè)"], &["é", "èê"]);
    check(&recurring("(\"a\"? \"b\")* \"a\""), &["a", "aba", "(bbaba)"], &["ab", "aa"]);
}

#[test]
fn a_grammar_of_json_takes_json() {
    let json = r#"
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"#;
    let good =
        ["{}", "{\"a\": [1, -2.5e+12, \"é\\n\\u00e9\", {\"b\": null}], \"c\":true}\n  ", "{\"\":[[],[[]]]}"];
    check(json, &good, &["[]", "{\"a\"}", "{\"a\": 01}", "{\"a\":1,}", "{\"a\": \"\n\"}"]);
    assert!(lark(json).matches("L").count() > 0, "strings and numbers are lexemes");
}

#[test]
fn tokens_are_named_by_text_and_by_number() {
    let text = lark("root ::= <think> (!<[9]>)* <[9]> [a-z]*");
    assert!(text.contains("<[7]>") && text.contains("<[^9]>") && text.contains("<[9]>"), "{text}");
    for name in ["<thought>", "<[256]>", "<[x]>"] {
        match to_lark(&format!("root ::= \"a\"\n  # c\nb ::= {name}"), &find_token) {
            Err(GrammarError::Unsupported { keyword, message }) => {
                assert_eq!(keyword, name);
                assert_eq!(message, "GBNF: rule b, line 3: the vocabulary has no such token");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn tokens_are_taken_as_they_are_named() {
    // Bytes are tokens here.
    let marked = "root ::= <[10]> content <[11]>\ncontent ::= (!<[11]>)*";
    check(marked, &["\nhello\u{b}", "\n\u{b}"], &["\nhello", "hello\u{b}", "\n\u{b}\u{b}"]);
    check("root ::= [a-z]* <[33]> .*", &["abc!é", "!"], &["abc", "A!"]);
}

#[test]
fn errors_name_the_rule_and_its_line() {
    for (gbnf, expected) in [
        ("", "GBNF: no rule is called root, where a grammar begins"),
        ("a ::= \"x\"", "GBNF: no rule is called root, where a grammar begins"),
        ("root ::= \"x\"\n\na ::= b", "GBNF: rule a, line 3: no rule is called b"),
        ("root ::= \"x", "GBNF: rule root, line 1: a literal is not closed"),
        ("root ::= [x", "GBNF: rule root, line 1: a class is not closed"),
        ("root ::= (\n\"x\"", "GBNF: rule root, line 2: a group is not closed: `)` is expected"),
        ("root ::= \"\\q\"", "GBNF: rule root, line 1: the escape \\q is unknown"),
        ("root ::= \"\\x4\"", "GBNF: rule root, line 1: 2 hexadecimal digits are expected"),
        ("root ::= \"\\U00110000\"", "GBNF: rule root, line 1: there is no such character"),
        ("root ::= \"\\uD83D\"", "GBNF: rule root, line 1: U+D83D is half of a character"),
        ("root ::= [z-a]", "GBNF: rule root, line 1: a range ends before it begins"),
        ("root ::= *", "GBNF: rule root, line 1: there is nothing to repeat"),
        ("root ::= \"a\"{,3}", "GBNF: rule root, line 1: a number is expected"),
        ("root ::= \"a\"{3,2}", "GBNF: rule root, line 1: 3 repetitions are more than 2"),
        ("root ::= \"a\"{3", "GBNF: rule root, line 1: `}` is expected behind the numbers of repetitions"),
        ("root ::= !\"a\"", "GBNF: rule root, line 1: a token is expected behind `!`"),
        ("root = \"a\"", "GBNF: rule root, line 1: `::=` is expected behind the name"),
        ("root ::= \"a\" ;", "GBNF: rule root, line 1: the end of the line is expected"),
        ("root ::= \"a\"\n\"b\"", "GBNF: line 2: the name of a rule is expected"),
    ] {
        match to_lark(gbnf, &|_| None) {
            Err(GrammarError::Invalid(message)) => assert_eq!(message, expected, "{gbnf}"),
            other => panic!("{gbnf}: {other:?}"),
        }
    }
}

#[test]
fn sizes_are_bounded() {
    let nested = |depth: usize| format!("root ::= {}\"a\"{}", "(".repeat(depth), ")".repeat(depth));
    lark(&nested(128));
    let chain = |length: usize| {
        let rules: String = (0..length).map(|n| format!("r{n} ::= \"a\" r{}\n", n + 1)).collect();
        format!("root ::= root \"b\" | r0\n{rules}r{length} ::= \"c\"")
    };
    lark(&chain(2000));
    lark(&format!("root ::= root \"b\" | {}[a-z]{}", "(".repeat(127), "*)".repeat(127)));
    for gbnf in [
        nested(129),
        format!("root ::= \"a\"{}", "*".repeat(5)),
        "root ::= \"a\"{10001}".to_owned(),
        "root ::= ((\"a\"{0,99}){0,99}){0,99}".to_owned(),
        format!("root ::= {}", "\"a\" ".repeat(40_000)),
    ] {
        assert!(matches!(to_lark(&gbnf, &|_| None), Err(GrammarError::TooComplex(_))), "{:.80}", gbnf);
    }
}

#[test]
fn gbnf_is_told_from_lark_by_its_definitions() {
    for text in ["root ::= \"a\"", "# c\n\n  root-1::=\"a\"", "root ::=\n  \"a\""] {
        assert!(is_gbnf(text), "{text}");
    }
    for text in ["start: \"a\"", "start: \"x ::= y\"", "A: /a ::= b/", "// r: ::= \nstart: A", ""] {
        assert!(!is_gbnf(text), "{text}");
    }
}
