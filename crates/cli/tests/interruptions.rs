//! A conversion that is killed, interrupted, not listened to or out of room.

mod program;

use program::*;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};

/// Starts a conversion, waits until it has said some lines about weights, and gives it with the rest of what it says.
fn said(lines: usize, args: &[&str]) -> (Child, BufReader<ChildStderr>) {
    let mut child = command(args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    for _ in 0..lines {
        stderr.read_line(&mut String::new()).unwrap();
    }
    (child, stderr)
}

/// The moments of the disk are tested in the library; this kills a process, with its threads and what the system has not written yet.
#[test]
fn killed_after_any_weight_and_resumed_the_bytes_are_the_same() {
    let dir = Folder::new("kill");
    let source = dir.llama("in", 2, 256);
    let whole = dir.path("whole");
    fn words<'w>(source: &'w str, target: &'w str, more: &[&'w str]) -> Vec<&'w str> {
        [&["convert", source, target, "--max-shard", "100kB", "--threads", "2"], more].concat()
    }
    ok(&words(&source, &whole, &["-q"]));
    let expected = contents(Path::new(&whole));
    assert!(expected.len() > 5, "several shards");
    let mut killed = 0;
    for lines in 1..=13 {
        let target = dir.path(&format!("out{lines}"));
        // A conversion may be killed more than once.
        for more in [&[][..], &["--resume"]] {
            let (mut child, _) = said(lines, &words(&source, &target, more));
            child.kill().unwrap();
            killed += usize::from(!child.wait().unwrap().success());
        }
        ok(&words(&source, &target, &["--resume", "-q"]));
        assert!(contents(Path::new(&target)) == expected, "killed after {lines} weights");
    }
    assert!(killed > 0);
}

/// Ctrl-C and SIGTERM say how to continue, and end as shells expect.
#[cfg(unix)]
#[test]
fn an_interrupt_leaves_a_state_that_can_be_resumed() {
    let dir = Folder::new("interrupt");
    let source = dir.llama("in", 8, 256);
    for (signal, code, force) in [("-INT", 130, None), ("-TERM", 143, None), ("-INT", 130, Some("--force"))] {
        let target = dir.path(&format!("{signal}{}", force.unwrap_or_default()));
        let args = ["convert", &source, &target, "--scale", "mse", "--threads", "1", "--mem", "1MB"];
        let first: Vec<&str> = args.into_iter().chain(force).collect();
        let (mut child, mut stderr) = said(1, &first);
        Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        let mut rest = String::new();
        stderr.read_to_string(&mut rest).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(code), "{rest}");
        let instead = force.map_or(String::new(), |force| format!("in place of {force} "));
        let hint = format!("hint: run the same command with --resume {instead}to continue");
        assert!(rest.contains(&hint), "{rest}");
        assert!(!Path::new(&target).exists());
        let mut again = args.to_vec();
        again.push("--resume");
        ok(&again);
        ok(&["verify", &target]);
        assert!(ok(&again).contains("complete already"), "a retry of what is done is no error");
    }
}

/// Nobody listens: the conversion goes on.
#[cfg(target_os = "linux")]
#[test]
fn a_closed_or_full_stderr_ends_nothing() {
    let dir = Folder::new("stderr");
    let source = dir.llama("in", 1, 64);
    let program = env!("CARGO_BIN_EXE_nvfp4");
    let train = "train --steps 2 --layers 1 --width 16 --heads 1 --context 8 --batch 1 --threads 1 --recipe bf16";
    for (name, stderr) in [("closed", "2>&-"), ("full", "2>/dev/full"), ("gone", "2>&1 >/dev/null | true")] {
        let target = dir.path(name);
        for command in [format!("convert {source} {target} -v"), train.to_string(), "convert nowhere out".to_string()] {
            let script = format!("set -o pipefail; {program} {command} {stderr}");
            let output = Command::new("bash").args(["-c", &script]).output().unwrap();
            let expected = if command.contains("nowhere") { Some(3) } else { Some(0) };
            assert_eq!(output.status.code(), expected, "{script}: {}", text(&output));
        }
        ok(&["verify", &target]);
    }
}

/// A limit on the size of files, which any machine has, stands for a disk that takes no more.
#[cfg(target_os = "linux")]
#[test]
fn a_disk_that_takes_no_more_is_an_error_and_leaves_no_target() {
    let dir = Folder::new("limit");
    let (source, target) = (dir.llama("in", 2, 512), dir.path("out"));
    let script = format!("ulimit -f 100; {} convert {source} {target} -q", env!("CARGO_BIN_EXE_nvfp4"));
    let output = Command::new("bash").args(["-c", &script]).output().unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("out.partial") && said.contains("File too large"), "{said}");
    assert!(!Path::new(&target).exists());
    ok(&["convert", &source, &target, "-q", "--resume"]);
    ok(&["verify", &target]);
}

/// The system's error says nothing about where it happened.
#[cfg(target_os = "linux")]
#[test]
fn a_full_standard_output_is_named() {
    let dir = Folder::new("full");
    let source = dir.llama("in", 1, 64);
    for args in [&["plan", &source][..], &["plan", &source, "--json"], &["completions", "bash"], &["doctor", "--json"]]
    {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = command(args).stdout(full).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{args:?}: {said}");
        assert!(said.contains("error: standard output: No space left on device"), "{args:?}: {said}");
    }
}
