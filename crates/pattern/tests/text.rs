//! The text form: printing and parsing round-trip; errors have a position and a reason.

use longspan_pattern::{Error, Heads, Layout, Level, Pattern, Shape};

fn error(text: &str) -> String {
    text.parse::<Pattern>().unwrap_err().to_string()
}

#[test]
fn texts_print_as_they_parse() {
    let table = [
        ("full", "full"),
        (" causal ( ) ", "causal"),
        ("causal&window( 256,0 )", "causal & window(256, 0)"),
        ("sliding_window(8)", "window(7, 0)"),
        ("~causal", "!causal"),
        ("!!causal", "causal"),
        ("!!!causal", "!causal"),
        ("! ( causal & full )", "!(causal & full)"),
        ("!causal & full", "!causal & full"),
        ("(causal & full) & sinks(1)", "causal & full & sinks(1)"),
        ("causal | (full | sinks(1))", "causal | full | sinks(1)"),
        ("causal | full & sinks(1)", "causal | full & sinks(1)"),
        ("(causal | full) & sinks(1)", "(causal | full) & sinks(1)"),
        ("dilated(2_048, 4)", "dilated(2048, 4)"),
        ("dilated(2048, 4, 0)", "dilated(2048, 4)"),
        ("dilated(2048, 4, 3)", "dilated(2048, 4, 3)"),
        ("global_tokens(4)", "global_tokens(4)"),
        ("keys( 4,7 ) | queries(0, 0)", "keys(4, 7) | queries(0, 0)"),
        ("neighborhood([3,4,],[1, 0])", "neighborhood([3, 4], [1, 0])"),
        ("strided(3)", "strided(3)"),
        ("hierarchical([(1, 2, 3), (4, 5, 6),])", "hierarchical([(1, 2, 3), (4, 5, 6)])"),
        ("documents([])", "documents([])"),
        ("documents([0, 3,1])", "documents([0, 3, 1])"),
        ("packed([1], [2], causal | full)", "packed([1], [2], causal | full)"),
        ("blocks_dilated(64, [])", "blocks_dilated(64, [])"),
        ("butterfly(16)", "butterfly(16)"),
        ("random(1, 2, 3, 18446744073709551615)", "random(1, 2, 3, 18446744073709551615)"),
        ("blocks(9, [[], [0..1, 1, 4..7], [3, 5]])", "blocks(9, [[], [0..2, 4..7], [3, 5]])"),
        ("causal\n  & full # not a comment", ""),
    ];
    for (text, printed) in table {
        match text.parse::<Pattern>() {
            Ok(pattern) => {
                assert_eq!(pattern.to_string(), printed);
                assert_eq!(printed.parse(), Ok(pattern));
            }
            Err(_) => assert_eq!(printed, "", "{text} doesn't parse"),
        }
    }
}

#[test]
fn errors_point_at_their_position() {
    let table = [
        (
            "",
            "expected a pattern, found the end; patterns are full, causal, window, \
             sliding_window, sinks, global_tokens, keys, queries, neighborhood, dilated, strided, \
             hierarchical, documents, packed, blocks_dilated, butterfly, random, blocks\n  \n  ^",
        ),
        (
            "causal & windw(256, 0)",
            "expected a pattern, found `windw`; did you mean `window`?\n  \
             causal & windw(256, 0)\n           ^^^^^",
        ),
        (
            "causal window(1, 2)",
            "expected `&`, `|` or the end, found `window`\n  causal window(1, 2)\n         ^^^^^^",
        ),
        (
            "(causal full)",
            "expected `&`, `|` or `)`, found `full`\n  (causal full)\n          ^^^^",
        ),
        ("window(3)", "expected `,`, found `)`\n  window(3)\n          ^"),
        ("window(3, x)", "expected a number for `right`, found `x`\n  window(3, x)\n            ^"),
        (
            "window(3, -1)",
            "expected a number for `right`, found `-`\n  window(3, -1)\n            ^",
        ),
        ("window(1, 2, 3)", "expected `)`, found `,`\n  window(1, 2, 3)\n             ^"),
        ("window", "expected `(`, found the end\n  window\n        ^"),
        (
            "documents([1, 2",
            "expected `,` or `]`, found the end\n  documents([1, 2\n                 ^",
        ),
        (
            "sinks(18446744073709551616)",
            "expected a number below 2^64, found `18446744073709551616`\n  \
             sinks(18446744073709551616)\n        ^^^^^^^^^^^^^^^^^^^^",
        ),
        (
            "full & strided(0) & causal",
            "strided: stride is 0, expected 1 to 2^61\n  full & strided(0) & causal\n         ^^^^^^^^^^",
        ),
        (
            "heads([causal])",
            "expected a pattern, found `heads`; `heads` must be outermost\n  heads([causal])\n  ^^^^^",
        ),
        ("causal & é", "expected a pattern, found `é`; patterns are"),
        ("causal &", "expected a pattern, found the end; patterns are"),
    ];
    for (text, message) in table {
        let error = error(text);
        assert!(error.starts_with(message), "{text}\n{error}\nexpected\n{message}");
    }
}

#[test]
fn a_long_text_is_excerpted_around_its_error() {
    let long = format!("documents([{}oops])", "1234, ".repeat(100_000));
    let error = error(&long);
    assert!(error.len() < 400, "{error}");
    let lines: Vec<&str> = error.lines().collect();
    assert_eq!(lines[0], "expected a number for `length`, found `oops`");
    let column = lines[2].find('^').unwrap();
    let shown: String = lines[1].chars().skip(column).collect();
    assert_eq!(shown, "oops])");
}

#[test]
fn constructors_check_arguments() {
    let level = |window, stride, grain| Level { window, stride, grain };
    let huge = (1 << 61) + 1;
    let table = [
        (Pattern::window(huge, 0), "window: left is 2305843009213693953, expected at most 2^61"),
        (Pattern::sliding_window(0), "sliding_window: width is 0, expected 1 to 2^61"),
        (Pattern::sinks(u64::MAX), "sinks: tokens is 18446744073709551615, expected at most 2^61"),
        (Pattern::dilated(0, 1, 0), "dilated: segment is 0, expected 1 to 2^61"),
        (Pattern::dilated(8, 0, 0), "dilated: rate is 0, expected 1 to 2^61"),
        (Pattern::dilated(8, 4, 4), "dilated: offset is 4, expected less than the rate"),
        (Pattern::strided(0), "strided: stride is 0, expected 1 to 2^61"),
        (Pattern::hierarchical([]), "hierarchical: levels is 0, expected at least one"),
        (Pattern::hierarchical([level(1, 0, 1)]), "hierarchical: stride is 0, expected 1 to 2^61"),
        (Pattern::hierarchical([level(1, 1, 0)]), "hierarchical: grain is 0, expected 1 to 2^61"),
        (
            Pattern::documents([1 << 60, 1]),
            "documents: lengths is 1152921504606846977, expected lengths that add up to at most 2^60",
        ),
        (
            Pattern::packed([1, 2], [3], Pattern::full()),
            "packed: 2 query lengths and 1 key lengths, expected equal numbers",
        ),
        (
            Pattern::packed([4, 5], [4, 5], Pattern::documents([4]).unwrap()),
            "documents: lengths add up to 4, expected 5, the position after the last key",
        ),
        (Pattern::blocks_dilated(0, [1]), "blocks_dilated: block is 0, expected 1 to 2^61"),
        (Pattern::blocks_dilated(8, [1, 0]), "blocks_dilated: rate is 0, expected 1 to 2^61"),
        (Pattern::butterfly(0), "butterfly: block is 0, expected 1 to 2^61"),
        (Pattern::random(1, 1, 0, 0), "random: blocks is 0, expected 1 to 2^61"),
        (
            Pattern::random(1, 1 << 20, 1 << 30, 0),
            "random: per_row is 1048576, expected at most 65536 blocks per row to draw",
        ),
        (
            Pattern::blocks(8, [vec![2..3, 1..2]]),
            "blocks: row 0 lists 1..2 out of order, expected ascending, disjoint, non-empty ranges",
        ),
    ];
    for (pattern, message) in table {
        assert_eq!(pattern.unwrap_err().to_string(), message);
    }
}

#[test]
fn compilation_checks_lengths() {
    let refuse = |text: &str, shape: &Shape| {
        Layout::compile(&text.parse().unwrap(), shape).unwrap_err().to_string()
    };
    let rule = "expected 10, the position after the last key";
    assert_eq!(
        refuse("causal & !documents([4, 5])", &Shape::new(10, 10)),
        format!("documents: lengths add up to 9, {rule}")
    );
    assert_eq!(
        refuse("packed([4, 6], [4, 5], full)", &Shape::new(10, 10)),
        format!("packed: key lengths add up to 9, {rule}")
    );
    assert_eq!(
        refuse("packed([4, 5], [4, 6], full)", &Shape::new(10, 10)),
        "packed: query lengths add up to 9, expected 10, the number of queries"
    );
    assert_eq!(
        refuse("packed([4, 5], [4, 6], full)", &Shape::new(9, 10).query_offset(0)),
        "packed: the query offset is 0, expected 1: sequences are aligned one by one, so omit \
         the offset"
    );
    assert!(
        Layout::compile(
            &"documents([4, 6])".parse().unwrap(),
            &Shape::new(2, 6).key_offset(4).query_offset(8)
        )
        .is_ok()
    );
}

#[test]
fn invalid_shapes_are_errors() {
    let refuse =
        |shape: Shape| Layout::compile(&Pattern::causal(), &shape).unwrap_err().to_string();
    assert_eq!(refuse(Shape::new(9, 9).rows(0..2)), "rows are 0..2, expected a range inside 0..1");
    #[expect(clippy::reversed_empty_ranges, reason = "the invalid input")]
    let reversed = 5..4;
    assert_eq!(
        refuse(Shape::new(9, 9).key_padding(reversed)),
        "the keys of key_padding are 5..4, expected a range inside 0..9"
    );
    let map = longspan_pattern::Positions::range(8, 2).unwrap();
    assert_eq!(
        refuse(Shape::new(9, 9).key_map(map)),
        "key map holds position 9, expected all of it inside 0..9"
    );
    assert_eq!(
        refuse(Shape::new(usize::MAX, 9)),
        "queries reach position 18446744073709551615, expected at most 2^60 from zero"
    );
    assert!(refuse(Shape::new(9, 9).query_offset(i64::MIN)).contains("at most 2^60"));
    assert_eq!(
        refuse(Shape::new(1, 1 << 50)),
        "keys make 17592186044416 blocks, expected fewer than 2^32: use larger blocks or a shard"
    );
    assert!(refuse(Shape::new(1 << 37, 1 << 37)).contains("outgrew"));
}

#[test]
fn patterns_serialize_as_text() {
    let pattern: Pattern = "causal & (window(3, 0) | sinks(2))".parse().unwrap();
    let json = serde_json::to_string(&pattern).unwrap();
    assert_eq!(json, "\"causal & (window(3, 0) | sinks(2))\"");
    assert_eq!(serde_json::from_str::<Pattern>(&json).unwrap(), pattern);
    let heads: Heads = "heads(causal, full)".parse().unwrap();
    let json = serde_json::to_string(&heads).unwrap();
    assert_eq!(json, "\"heads([causal, full])\"");
    assert_eq!(serde_json::from_str::<Heads>(&json).unwrap(), heads);
    let error = serde_json::from_str::<Pattern>("\"strided(0)\"").unwrap_err().to_string();
    assert!(error.contains("stride is 0"), "{error}");
    assert!(matches!("heads([])".parse::<Heads>(), Err(Error::Parse(_))));
}

#[test]
fn laws_of_boolean_algebra() {
    let [a, b, c] = ["causal", "window(5, 9)", "strided(3)"].map(|t| t.parse::<Pattern>().unwrap());
    let compile = |pattern: Pattern| Layout::compile(&pattern, &Shape::new(333, 301)).unwrap();
    let equal = |x, y| assert_eq!(compile(x).same_pairs(&compile(y)), Ok(true));
    equal(a.clone() & b.clone(), b.clone() & a.clone());
    equal(a.clone() | b.clone(), b.clone() | a.clone());
    equal(!(a.clone() & b.clone()), !a.clone() | !b.clone());
    equal(a.clone() & (b.clone() | c.clone()), a.clone() & b.clone() | a.clone() & c.clone());
    equal(a.clone() | !a.clone(), Pattern::full());
    equal(a.clone() & !a.clone(), !Pattern::full());
    assert_eq!(compile(a).same_pairs(&compile(b)), Ok(false));
}
