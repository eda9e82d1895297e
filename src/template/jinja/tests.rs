//! Values, operations, bounds and forms of conversations, through whole templates.

use serde_json::json;

use super::*;
use crate::{Message, ToolCall};

fn rendered(source: &str, variables: &Json) -> Result<String, TemplateError> {
    let variables = variables.as_object().cloned().unwrap_or_default();
    ChatTemplate::new(source, SpecialTokens::default())?.render_variables(&variables, DateTime::from_unix(0))
}

#[track_caller]
fn check(source: &str, wanted: &str) {
    let variables = json!({
        "d": {"b": 1, "a": [1, 2.5, null, true, "it's"], "items": "own"},
        "l": [3, 1, 2],
        "s": "Hello wörld",
        "rows": [{"k": "x", "v": 1}, {"k": "y", "v": 2}, {"k": "x", "v": 3}],
    });
    assert_eq!(rendered(source, &variables).as_deref(), Ok(wanted), "{source}");
}

#[test]
fn values_print_as_in_python() {
    check(
        "{{ none }} {{ true }} {{ 1.0 }} {{ 1e16 }} {{ 1e-5 }} {{ missing }}|",
        "None True 1.0 1e+16 1e-05 |",
    );
    check("{{ d }}", r#"{'b': 1, 'a': [1, 2.5, None, True, "it's"], 'items': 'own'}"#);
    check("{{ (1,) }} {{ (1, 'a') }} {{ 'a\\n\\t' | list }}", "(1,) (1, 'a') ['a', '\\n', '\\t']");
    check("{{ 'x' ~ none ~ true ~ d.a }}", r#"xNoneTrue[1, 2.5, None, True, "it's"]"#);
}

#[test]
fn json_is_printed_as_hugging_face_prints_it() {
    check("{{ d | tojson }}", r#"{"b": 1, "a": [1, 2.5, null, true, "it's"], "items": "own"}"#);
    check("{{ s | tojson }} {{ s | tojson(ensure_ascii=true) }}", "\"Hello wörld\" \"Hello w\\u00f6rld\"");
    check(
        "{{ {'b': [1, {}], 'a': []} | tojson(indent=2) }}",
        "{\n  \"b\": [\n    1,\n    {}\n  ],\n  \"a\": []\n}",
    );
    check("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", r#"{"a":2,"b":1}"#);
    check("{{ '<&>' | tojson }}", "\"<&>\"");
}

#[test]
fn operators_are_pythons() {
    check("{{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 2 ** 3 }} {{ +true }}", "3 -4 2 3.5 8 1");
    check(
        "{{ 'ab' * 2 }} {{ [1] + [2] }} {{ 'a' in s }} {{ 'H' in s }} {{ 'b' in d }}",
        "abab [1, 2] False True True",
    );
    check("{{ '%s is %d%%' % ('x', 5) }} {{ '%.2f' % 1.005 }} {{ '%s' % none }}", "x is 5% 1.00 None");
    check("{{ 1 == true }} {{ [1] == [1.0] }} {{ 1 < 2 < 3 }} {{ 1 < 2 > 3 }}", "True True True False");
    check(
        "{{ s[::-1] }} {{ l[-2:] }} {{ s[-1] }} {{ l[::2] }} {{ l[9] is defined }}",
        "dlröw olleH [1, 2] d [3, 2] False",
    );
}

#[test]
fn methods_come_before_members_and_mutation_is_refused() {
    check("{% for k, v in d.items() %}{{ k }};{% endfor %}{{ d['items'] }}", "b;a;items;own");
    check("{{ d.get('zz') }} {{ d.get('zz', 1) }} {{ d.keys() | list }}", "None 1 ['b', 'a', 'items']");
    check("{{ '  a b ' .strip() }}|{{ 'xxaxx'.lstrip('x') }}|{{ 'a,b,c'.split(',', 1)[-1] }}", "a b|axx|b,c");
    check(
        "{{ 'abc'.startswith(('x', 'a')) }} {{ 'hello wORLD'.title() }} {{ 'abcabc'.find('c') }}",
        "True Hello World 2",
    );
    check(
        "{{ '{}-{}'.format(1, 'x') }} {{ 'a\\nb'.splitlines() }} {{ '-'.join(['a', 'b']) }}",
        "1-x ['a', 'b'] a-b",
    );
    assert!(rendered("{{ l.append(1) }}", &json!({"l": []})).is_err());
}

#[test]
fn filters_are_lazy_where_jinja2_is() {
    check(
        "{{ rows | map(attribute='k') | join(',') }} {{ rows | selectattr('v', '>', 1) | list | length }}",
        "x,y,x 2",
    );
    check("{{ rows | map(attribute='k') | unique | list }} {{ rows | sum(attribute='v') }}", "['x', 'y'] 6");
    check(
        "{{ l | sort }} {{ l | sort(reverse=true) | first }} {{ d | dictsort | map('first') | list }}",
        "[1, 2, 3] 3 ['a', 'b', 'items']",
    );
    check(
        "{{ ['a', 'B', 'A'] | unique | list }} {{ 'a\\nb' | indent(2) }} {{ x | default('y') }}",
        "['a', 'B'] a\n  b y",
    );
    check("{{ none | selectattr('x') | list }}", "[]");
    assert!(rendered("{{ [1] | map('string') | length }}", &json!({})).is_err());
}

#[test]
fn statements_are_jinja2s() {
    check(
        "{% set ns = namespace(n=0) %}{% for i in l %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
        "6",
    );
    check(
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "013",
    );
    check(
        "{% macro m(a, b='z') %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ m(1) }}{% call m(2, b=3) %}!{% endcall %}",
        "1z23!",
    );
    check("{% set x %}a{{ 1 }}{% endset %}{{ x | upper }}{% filter upper %}q{% endfilter %}", "A1Q");
    check("{% generation %}\na{% set y = 1 %}{% endgeneration %}{{ y is defined }}", "aFalse");
    check(
        "{% for i in l %}{{ loop.index }}{{ loop.last }}{{ loop.previtem }}{% endfor %}",
        "1False2False33True1",
    );
    check("{{ strftime_now('%d %b %Y') }}", "01 Jan 1970");
}

#[test]
fn safe_text_escapes_what_is_added_to_it() {
    check("{{ '<' + ('>' | safe) }}{{ ('<' | e) ~ '<' }}{{ ('%s' | safe) % '<' }}", "&lt;>&lt;<&lt;");
}

#[test]
fn errors_say_what_and_where() {
    let error = |source: &str| rendered(source, &json!({"d": {}})).expect_err(source);
    assert_eq!(
        error("a\n{{ raise_exception('no ' + 'way') }}"),
        TemplateError::Raised { line: 2, message: "no way".to_owned() }
    );
    assert!(
        matches!(error("a\n\n{{ d.x.y }}"), TemplateError::Render { line: 3, message } if message.contains("'y'"))
    );
    assert!(matches!(error("a\n{% if %}"), TemplateError::Syntax { line: 2, .. }));
    assert!(matches!(error("\n{% include 'x' %}"), TemplateError::Render { line: 2, .. }));
    assert!(
        matches!(error("{{ 1 + 'a' }}"), TemplateError::Render { message, .. } if message.contains("'int' and 'str'"))
    );
    assert!(
        matches!(error("{{ 1 | nofilter }}"), TemplateError::Render { message, .. } if message.contains("nofilter"))
    );
}

/// Rendered on a thread with the stack of a plain worker, so that a recursion without bound would end the test.
#[test]
fn unknown_names_are_named() {
    for (source, named) in [
        ("{{ 'a'.zfill(3) }}", "'str object' has no attribute 'zfill'"),
        ("{{ d.popitems() }}", "'dict object' has no attribute 'popitems'"),
        ("{{ l.index(1) }}", "'list object' has no attribute 'index'"),
        ("{{ 'abc'.find('c', 1) }}", "str.find() with 2 arguments is not supported"),
        ("{{ 'a b c'.rsplit(none, 1) }}", "rsplit() with a limit needs a separator"),
        ("{{ 'a' | truncate }}", "filter truncate is unknown"),
        ("{{ 1.5 | round }}", "filter round is unknown"),
        ("{{ l | max }}", "filter max is unknown"),
        ("{{ 'ff' | int(0, 16) }}", "int() takes at most 1 arguments"),
        ("{{ 6 is divisibleby(3) }}", "test divisibleby is unknown"),
        ("{{ l | map('wordcount') | list }}", "No filter named 'wordcount'"),
        ("{{ l | select('escaped') | list }}", "No test named 'escaped'"),
        ("{{ 'a' is escaped }}", "test escaped is unknown"),
        ("{{ cycler('a') }}", "cycler"),
    ] {
        let message = rendered(source, &json!({"d": {}, "l": [1]})).expect_err(source).to_string();
        assert!(message.contains(named), "{source}: {message}");
    }
}

#[track_caller]
fn too_expensive(source: &str) {
    let owned = source.to_owned();
    let worker = std::thread::Builder::new().stack_size(2 << 20);
    let result = worker.spawn(move || rendered(&owned, &json!({"deep": "x"}))).expect("a thread").join();
    let start: String = source.chars().take(80).collect();
    match result {
        Ok(Err(TemplateError::TooExpensive(_) | TemplateError::Syntax { .. })) => {}
        other => panic!("{start}: {other:?}"),
    }
}

#[test]
fn memory_is_bounded() {
    too_expensive(
        "{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}{% for i in range(100) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    );
    too_expensive(
        "{% set ns = namespace(x='a') %}{% for i in range(100) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    );
    too_expensive("{% set n = 1000000000 %}{{ 'a' * n }}");
    too_expensive("{{ 'a' * 10 ** 9 }}");
    too_expensive("{% set n = 1000000000 %}{{ ([1] * n) | length }}");
    too_expensive(
        "{% set ns = namespace(x=[1, 1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    );
    too_expensive(
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    );
    too_expensive(
        "{% for i in range(99999) %}{% for j in range(99999) %}aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa{% endfor %}{% endfor %}",
    );
    too_expensive("{% set n = 900000000 %}{{ 'a' | indent(n, true) }}");
    too_expensive("{{ '%999999999d' % 5 }}");
    too_expensive("{% set x = 'a' * 1000000 %}{{ x.replace('a', x) }}");
    too_expensive("{% set x = 'a' * 1000000 %}{{ x | list | join(x) }}");
}

#[test]
fn steps_are_bounded() {
    too_expensive("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}");
    too_expensive(
        "{% for i in range(9999) %}{% for j in range(9999) %}{% macro m() %}{{ j }}{% endmacro %}{% endfor %}{% endfor %}",
    );
    too_expensive("{{ range(10 ** 12) }}");
    too_expensive(
        "{% set l = range(99999) | list %}{% for i in l %}{% if 5.5 in l %}{% endif %}{% endfor %}",
    );
}

#[test]
fn nesting_is_bounded() {
    too_expensive("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}");
    too_expensive("{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}");
    too_expensive("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}");
    too_expensive("{% block b %}{{ self.b() }}{% endblock %}");
    too_expensive(
        "{% set ns = namespace(x=[]) %}{% for i in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}",
    );
    too_expensive(
        "{% set ns = namespace(x={}) %}{% for i in range(90000) %}{% set ns.x = {'a': ns.x} %}{% endfor %}",
    );
    too_expensive(
        "{% set ns = namespace(x=1) %}{% for i in range(90000) %}{% set ns.x = namespace(x=ns.x) %}{% endfor %}",
    );
    too_expensive(&format!("{{{{ {}1{} }}}}", "(".repeat(600), ")".repeat(600)));
    too_expensive(&format!("{{{{ {}1{} }}}}", "[".repeat(600), "]".repeat(600)));
    too_expensive(&"{% if a %}".repeat(5000));
    too_expensive(&format!("{{{{ x{} }}}}", " + 1".repeat(5000)));
}

#[test]
fn the_largest_expressions_that_pass_fit_a_small_stack() {
    let long = [
        format!("{{{{ deep{} }}}}", " ~ 1".repeat(740)),
        format!("{{{{ {}deep }}}}", "not ".repeat(1400)),
        format!("{{{{ {}1 }}}}", "- ".repeat(1400)),
        format!("{{{{ deep{} }}}}", "|trim".repeat(700)),
        format!("{{{{ d{} }}}}", " if 0 else d".repeat(370)),
        format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(400)),
        format!("{{{{ {}1{} }}}}", "(".repeat(70), ")".repeat(70)),
    ];
    for source in long {
        let worker = std::thread::Builder::new().stack_size(2 << 20);
        let result = worker.spawn(move || rendered(&source, &json!({"deep": "x"}))).expect("a thread").join();
        assert!(matches!(result, Ok(Ok(_) | Err(TemplateError::Syntax { .. }))), "{result:?}");
    }
}

#[test]
fn cycles_and_stored_loops_are_refused() {
    for source in [
        "{% set ns = namespace() %}{% set ns.x = ns %}",
        "{% set ns = namespace() %}{% set ns.x = [ns] %}",
        "{% set ns = namespace() %}{% for i in [1] %}{% set ns.x = loop %}{% endfor %}",
        "{% for i in [1] %}{{ loop.cycle() }}{% endfor %}",
        "{% for i in [1] %}{{ loop.cycle(*[]) }}{% endfor %}",
    ] {
        assert!(rendered(source, &json!({})).is_err(), "{source}");
    }
    check("{% set a = namespace(t='x') %}{% set l = [a] %}{% set a.t = 'y' %}{{ l[0].t }}", "y");
}

fn talk(turns: &[(&str, &str)]) -> Conversation {
    let messages = turns.iter().map(|(role, text)| Message::new(Role::from(*role), *text)).collect();
    Conversation { messages, ..Conversation::default() }
}

const CHATML: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

#[test]
fn a_final_message_is_continued_without_its_turn_end() {
    let template = ChatTemplate::new(CHATML, SpecialTokens::default()).expect("a template");
    let options = RenderOptions { continue_final_message: true, ..RenderOptions::default() };
    let text = template.render(&talk(&[("user", "hi"), ("assistant", "Well, ")]), &options);
    assert_eq!(text.as_deref(), Ok("<user>hi<end>\n<assistant>Well,"));
    assert!(template.render(&talk(&[("user", "hi")]), &options).is_err());
}

/// Renders a conversation, with `<s>` for the beginning of a sequence.
fn told(source: &str, conversation: &Conversation) -> Result<String, TemplateError> {
    let specials = SpecialTokens { bos: Some("<s>".to_owned()), ..SpecialTokens::default() };
    ChatTemplate::new(source, specials)?.render(conversation, &RenderOptions::default())
}

/// An answer that calls `f`.
fn calling(content: Option<&str>, arguments: Json) -> Message {
    let call = ToolCall { id: None, name: "f".to_owned(), arguments };
    let content = content.map(crate::Content::from);
    Message { content, tool_calls: vec![call], ..Message::assistant("") }
}

fn holding(messages: Vec<Message>) -> Conversation {
    Conversation { messages, ..Conversation::default() }
}

#[test]
fn absent_tools_are_none_and_absent_members_are_undefined() {
    let source =
        "{{ tools is none }}{{ documents is none }}{{ messages[0].tool_calls is defined }}{{ bos_token }}";
    assert_eq!(told(source, &talk(&[("user", "hi")])).as_deref(), Ok("TrueTrueFalse<s>"));
}

#[test]
fn reasoning_comes_by_both_of_its_names() {
    let thoughtful = Message { reasoning: Some("Hm.".to_owned()), ..Message::assistant("Yes.") };
    let conversation = holding(vec![thoughtful]);
    for (source, expected) in [
        ("{{ messages[0].thinking }}|{{ messages[0].reasoning_content }}", "Hm.|Hm."),
        ("{{ messages[0].reasoning }}", "Hm."),
        ("{{ messages[0].thinking }}|{{ messages[0].reasoning is defined }}", "Hm.|False"),
    ] {
        assert_eq!(told(source, &conversation).as_deref(), Ok(expected), "{source}");
    }
}

#[test]
fn tools_without_a_description_get_an_empty_one_where_the_template_needs_it() {
    let source = "{% for t in tools %}{{ t.function.name + ': ' + t.function.description }};{% for n, p in \
        t.function.parameters.properties.items() %}{{ n + ' ' + p.description }}{% endfor %}{% endfor %}";
    let parameters = json!({"type": "object", "properties": {"x": {"type": "string"}}});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
    let conversation = Conversation { tools: vec![tool], ..talk(&[("user", "hi")]) };
    assert_eq!(told(source, &conversation).as_deref(), Ok("f: ;x "));
    // One that does without sees nothing new.
    let text = told("{{ tools | tojson }}", &conversation).expect("a rendering");
    assert!(!text.contains("description"), "{text}");
}

/// Each source wants content or arguments in a form of its own.
#[test]
fn calls_and_contents_have_the_form_that_the_template_takes() {
    let asked = |text: &str, answer: Message| holding(vec![Message::user(text), answer]);
    let as_text = "{% for m in messages %}{% for c in m.tool_calls %}{{ '> ' + c.function.arguments }}{% endfor %}{% endfor %}";
    let tests_for_none = "{% for m in messages %}{% if m['content'] is none %}{{ m.tool_calls[0].function.name }}{% else %}\
        {{ m['content'].strip() }}{% endif %};{% endfor %}";
    let knows_texts = "{% for m in messages %}{{ 'x' + m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %};{% endfor %}";
    let would_escape = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}\
        {% set a = c.function.arguments %}{% if a is not string %}{% set a = a | tojson | safe %}{% endif %}\
        {{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' + a + '}' }}{% endfor %}{% endfor %}";
    for (source, conversation, expected) in [
        (as_text, holding(vec![calling(Some(""), json!({"a": [1, "x"]}))]), r#"> {"a": [1, "x"]}"#),
        (tests_for_none, asked(" hi ", calling(None, json!({}))), "hi;f;"),
        (knows_texts, asked("hi", calling(None, json!({}))), "xhi;xf;"),
        // The user's text stays as it is.
        (
            would_escape,
            asked("&#34;", calling(Some(""), json!({"a": "<"}))),
            "&#34;{\"name\": \"f\", \"arguments\": {\"a\": \"<\"}}",
        ),
    ] {
        assert_eq!(told(source, &conversation).as_deref(), Ok(expected), "{source}");
    }
}

#[test]
fn a_variable_with_a_default_value_is_read() {
    let reads = |source: &str| {
        let template = ChatTemplate::new(source, SpecialTokens::default()).expect("a template");
        template.reads("enable_thinking")
    };
    for (source, is_read) in [
        ("{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}", true),
        ("{%- set enable_thinking = enable_thinking if enable_thinking is defined else True %}", true),
        ("{%- set enable_thinking = enable_thinking | default(true) -%}", true),
        ("{% set enable_thinking = true %}{{ enable_thinking }}", false),
        ("{{ message.enable_thinking }}", false),
    ] {
        assert_eq!(reads(source), is_read, "{source}");
    }
}

#[test]
fn a_template_can_be_shared_by_threads() {
    fn shared<T: Send + Sync + Clone>() {}
    shared::<ChatTemplate>();
}
