//! Conversions in parts, by processes that are killed, as a user or a launcher runs them.

mod program;

use program::*;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

/// Each part is killed once after one of its weights; two are made twice; the end makes the page too.
#[test]
fn killed_parts_make_the_checkpoint_and_the_report_of_one_process() {
    let dir = Folder::new("parts");
    let (source, target, page) = (dir.llama("in", 3, 256), dir.path("out"), dir.path("page.html"));
    let words = ["convert", &source, &target, "--max-shard", "100kB", "--threads", "1"];
    let with = |more: &[&'static str]| [&words[..], more].concat();
    ok(&[&words[..], &["-q", "--report", &page]].concat());
    let expected = (contents(Path::new(&target)), std::fs::read(&page).unwrap());
    assert!(expected.0.len() > 5, "several shards");
    std::fs::remove_dir_all(&target).unwrap();
    std::fs::remove_file(&page).unwrap();
    let kill = |lines: usize, part: &'static str| {
        let mut child = command(&with(&["--part", part])).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        for _ in 0..lines {
            stderr.read_line(&mut String::new()).unwrap();
        }
        child.kill().unwrap();
        child.wait().unwrap();
    };
    [(2, "0/4"), (1, "3/4"), (3, "1/4")].into_iter().for_each(|(lines, part)| kill(lines, part));
    for part in ["1/4", "3/4", "0/4", "1/4", "3/4"] {
        ok(&with(&["-q", "--part", part]));
    }
    assert!(ok(&with(&["-q", "--part", "1/4"])).contains("complete already: "));
    let refused = nvfp4(&with(&["--finish"]));
    let said = text(&refused);
    assert_eq!(refused.status.code(), Some(3), "{said}");
    assert!(said.contains("this part is missing or not complete: 2/4; make it, and finish then"), "{said}");
    assert!(said.contains("hint: the same command with --part 2/4 in place of --finish"), "{said}");
    kill(1, "2/4");
    let said = ok(&with(&["-q", "--part", "2/4", "--mem", "1MB"]));
    assert!(said.contains("part     2/4 in ") && said.contains("--finish in place of --part"), "{said}");
    let other = text(&nvfp4(&with(&["--finish", "--scale", "mse"])));
    assert!(other.contains(r#"'scale' "Max", and here it is "Mse""#), "{other}");
    let said = ok(&[&words[..], &["-q", "--finish", "--report", &page]].concat());
    assert!(said.contains("checks   ok: "), "{said}");
    assert!(contents(Path::new(&target)) == expected.0);
    assert!(std::fs::read(&page).unwrap() == expected.1, "the report is that of one process");
    assert!(!Path::new(&dir.path("out.parts")).exists() && !Path::new(&dir.path("out.partial")).exists());
}

#[test]
fn what_is_not_a_part_is_a_usage_error_that_names_the_parts() {
    let dir = Folder::new("no-part");
    let (source, target) = (dir.llama("in", 1, 64), dir.path("out"));
    for (more, expected) in [
        (&["--part", "8/8"][..], "parts are counted from 0: expected 0/8 to 7/8"),
        (&["--part", "3"], "expected a part such as 0/8"),
        (&["--part", "0/2", "--finish"], "cannot be used with"),
        (&["--part", "0/2", "--report", "r.html"], "cannot be used with"),
        (&["--finish", "--dry-run"], "cannot be used with"),
    ] {
        let output = nvfp4(&[&["convert", &source, &target], more].concat());
        assert_eq!(output.status.code(), Some(2), "{more:?}");
        assert!(text(&output).contains(expected), "{more:?}: {}", text(&output));
    }
    let none = nvfp4(&["convert", &source, &target, "--finish"]);
    assert!(text(&none).contains("there are no parts of a conversion to it; make them first"), "{}", text(&none));
}

#[test]
fn a_plan_says_what_each_part_has_to_do() {
    let dir = Folder::new("plan-parts");
    let source = dir.llama("in", 2, 256);
    let said = ok(&["plan", &source, "--parts", "3"]);
    let first: Vec<&str> = said.lines().map(|line| line.split_whitespace().next().unwrap()).collect();
    assert_eq!(first, ["PART", "0/3", "1/3", "2/3", "--finish"], "{said}");
    assert!(said.contains("--finish copies up to ") && said.contains("more parts than files"), "{said}");
    let said = ok(&["plan", &source, "--parts", "3", "--max-shard", "100kB"]);
    assert!(said.contains("--finish copies nothing"), "{said}");
    let plan = json_of(&["plan", &source, "--parts", "3", "--json"]);
    let parts = plan["parts"].as_array().unwrap();
    assert_eq!(parts.iter().map(|part| part["bytes"].as_u64().unwrap()).sum::<u64>(), plan["bytes"]);
    assert_eq!(nvfp4(&["plan", &source, "--parts", "0"]).status.code(), Some(2));
}
