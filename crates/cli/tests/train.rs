//! `nvfp4 train` on tiny models, as a user runs it.

use safetensors::SafeTensors;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A model that takes milliseconds, unless a test says otherwise.
const TINY: [[&str; 2]; 6] = [
    ["--layers", "1"],
    ["--width", "32"],
    ["--heads", "2"],
    ["--context", "16"],
    ["--batch", "2"],
    ["--checkpoint-every", "3"],
];

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("train-{name}"));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_string()
    }

    /// Two thousand bytes to learn from.
    fn text(&self) -> String {
        let text: String = (0..200).map(|i| format!("{} green ", i % 7 * i)).collect();
        std::fs::write(self.0.join("text.txt"), text).unwrap();
        self.path("text.txt")
    }
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    let tiny = TINY.iter().filter(|[name, _]| !args.contains(name)).flatten();
    command.arg("train").args(tiny).args(args).env_remove("RAYON_NUM_THREADS").env_remove("RUST_BACKTRACE");
    command
}

fn train(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

fn good(args: &[&str]) -> String {
    let output = train(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// What standard error says when the command fails.
fn bad(args: &[&str]) -> String {
    let output = train(args);
    assert!(!output.status.success(), "{args:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// Results without the time that they took.
fn results(args: &[&str]) -> Value {
    let mut value: Value = serde_json::from_str(&good(&[args, &["--json"]].concat())).unwrap();
    for part in ["runs", "table"] {
        for row in value[part].as_array_mut().unwrap() {
            row.as_object_mut().unwrap().remove("tokens_per_second").unwrap();
        }
    }
    value
}

/// Parameters, moments and everything else that a checkpoint holds, but for the time.
fn state(folder: &Path) -> (BTreeMap<String, Vec<u8>>, BTreeMap<String, String>) {
    let bytes = std::fs::read(folder.join("training.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = tensors.tensors().into_iter().map(|(name, view)| (name, view.data().to_vec())).collect();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let mut metadata: BTreeMap<String, String> = header.metadata().clone().unwrap().into_iter().collect();
    let mut notes: Value = serde_json::from_str(&metadata["note.train"]).unwrap();
    notes["history"].as_object_mut().unwrap().remove("seconds").unwrap();
    metadata.insert("note.train".into(), notes.to_string());
    (tensors, metadata)
}

#[test]
fn side_by_side_is_the_same_again_with_any_number_of_threads() {
    let folder = Folder::new("threads");
    let text = folder.text();
    let args = ["--text", &text, "--steps", "5", "--seeds", "2", "--quiet"];
    let run = |threads| results(&[&args[..], &["--threads", threads]].concat());
    let (one, three) = (run("1"), run("3"));
    assert_eq!(one, three);
    let runs = one["runs"].as_array().unwrap();
    let names: Vec<(&str, u64)> =
        runs.iter().map(|run| (run["recipe"].as_str().unwrap(), run["seed"].as_u64().unwrap())).collect();
    assert_eq!(names, [("bf16", 1), ("nvfp4", 1), ("bf16", 2), ("nvfp4", 2)]);
    let first = |run: usize| runs[run]["train"][0]["loss"].as_f64().unwrap();
    assert!(first(0) != first(1) && first(0) != first(2));
    // Both recipes begin with the same model and the same batch.
    assert!((first(0) / first(1) - 1.0).abs() < 0.01, "{} {}", first(0), first(1));
    assert!(one["table"][1]["gap_percent"]["mean"].is_number() && one["table"][0]["gap_percent"].is_null());
    // A run alone is the same run.
    let alone = results(&["--text", &text, "--steps", "5", "--seed", "2", "--recipe", "nvfp4", "--quiet"]);
    assert_eq!(alone["runs"][0], one["runs"][3]);
}

#[test]
fn a_resumed_run_ends_in_the_same_bytes() {
    let folder = Folder::new("resume");
    let text = folder.text();
    let (straight, broken) = (folder.path("straight"), folder.path("broken"));
    let args = |to| {
        [
            "--text",
            &text,
            "--steps",
            "9",
            "--recipe",
            "nvfp4",
            "--recipe",
            "delayed_scaling",
            "--checkpoint",
            to,
            "--quiet",
        ]
    };
    let expected = results(&args(&straight));
    for stop in ["4", "7"] {
        let resume: &[&str] = if stop == "4" { &[] } else { &["--resume"] };
        let said = bad(&[&args(&broken)[..], &["--stop-at", stop], resume].concat());
        assert!(said.contains("2 of 2 runs stopped; the same command with --resume continues from"), "{said}");
    }
    assert_eq!(results(&[&args(&broken)[..], &["--resume"]].concat()), expected);
    for run in ["nvfp4-seed-1", "delayed_scaling-seed-1"] {
        let (straight, broken) = (Path::new(&straight).join(run), Path::new(&broken).join(run));
        assert!(state(&straight) == state(&broken), "{run}");
    }
    // Once more there is nothing to do, and the result is still there.
    assert_eq!(results(&[&args(&broken)[..], &["--resume"]].concat()), expected);
}

#[test]
#[cfg(unix)]
fn ctrl_c_keeps_what_was_done() {
    use std::io::{BufRead, BufReader};
    let folder = Folder::new("interrupt");
    let (text, kept) = (folder.text(), folder.path("kept"));
    let args = ["--text", &text, "--recipe", "nvfp4", "--steps", "1000000", "--eval-every", "2", "--checkpoint", &kept];
    let args = [&args[..], &["--checkpoint-every", "500000"]].concat();
    let mut child = command(&args).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("step 4/1000000")));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    assert!(lines.any(|line| line.contains("1 of 1 runs stopped; the same command with --resume continues from")));
    assert!(!child.wait().unwrap().success());
    let (_, metadata) = state(&Path::new(&kept).join("nvfp4-seed-1"));
    assert!(metadata["step"].parse::<u64>().unwrap() >= 4);
}

#[test]
fn every_recipe_of_the_table_trains() {
    let folder = Folder::new("ablations");
    let text = folder.text();
    let all = results(&["--text", &text, "--steps", "2", "--ablations", "--quiet"]);
    assert_eq!(all["table"].as_array().unwrap().len(), 7);
    let losses: std::collections::BTreeSet<String> =
        all["runs"].as_array().unwrap().iter().map(|run| run["held_out"][1]["loss"].to_string()).collect();
    assert_eq!(losses.len(), 7, "no two recipes are the same: {losses:?}");
}

#[test]
fn the_page_has_curves_gaps_and_a_table_and_needs_nothing_else() {
    let folder = Folder::new("report");
    let (text, page) = (folder.text(), folder.path("page.html"));
    let table =
        good(&["--text", &text, "--steps", "4", "--eval-every", "2", "--seeds", "2", "--quiet", "--report", &page]);
    assert!(table.contains("| bf16 ") && table.contains("| nvfp4 ") && table.contains(" %"), "{table}");
    let page = std::fs::read_to_string(page).unwrap();
    for part in
        ["Held-out loss", "Gap to bf16 in %", "Training loss", "prefers-color-scheme: dark", "name=\"viewport\""]
    {
        assert!(page.contains(part), "{part}");
    }
    assert_eq!(page.matches("<svg ").count(), 3);
    assert!(page.matches("<polygon ").count() >= 4, "spreads over the seeds");
    assert!(!page.contains("NaN") && !page.contains("<script") && !page.contains("http"));
}

#[test]
fn results_of_several_calls_make_one_table() {
    let folder = Folder::new("merge");
    let text = folder.text();
    let whole = results(&["--text", &text, "--steps", "3", "--seeds", "2", "--quiet"]);
    for recipe in ["nvfp4", "bf16"] {
        for seed in ["1", "2"] {
            let json =
                good(&["--text", &text, "--steps", "3", "--recipe", recipe, "--seed", seed, "--quiet", "--json"]);
            std::fs::write(folder.0.join(format!("{recipe}-{seed}.json")), json).unwrap();
        }
    }
    let merged = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_nvfp4")).arg("train").args(args).output().unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (ok, table, _) = merged(&["--merge", folder.0.to_str().unwrap(), "--json"]);
    let mut table: Value = serde_json::from_str(&table).unwrap();
    for row in table["table"].as_array_mut().unwrap() {
        row.as_object_mut().unwrap().remove("tokens_per_second");
    }
    assert!(ok && table["table"] == whole["table"], "{table:#}");

    let other = good(&["--text", &text, "--steps", "4", "--recipe", "bf16", "--seed", "3", "--quiet", "--json"]);
    std::fs::write(folder.0.join("other.json"), other).unwrap();
    let (ok, _, said) = merged(&["--merge", folder.0.to_str().unwrap()]);
    assert!(!ok && said.contains("made with steps = 4, but steps = 3 was asked for"), "{said}");
}

#[test]
fn bytes_may_be_joined_to_pairs() {
    let folder = Folder::new("pairs");
    let text = folder.text();
    let result = results(&["--text", &text, "--vocab", "260", "--steps", "2", "--recipe", "nvfp4", "--quiet"]);
    assert_eq!(result["settings"]["vocabulary_size"], 260);
}

#[test]
fn a_loss_that_is_no_number_names_the_step_the_layer_and_the_tensor() {
    let folder = Folder::new("nan");
    let (text, kept) = (folder.text(), folder.path("kept"));
    let args =
        ["--text", &text, "--steps", "60", "--recipe", "nvfp4", "--lr", "1e30", "--quiet", "--checkpoint", &kept];
    let said = bad(&args);
    assert!(said.contains("error: nvfp4, seed 1: step 1, loss NaN: the first tensor that is not finite is"), "{said}");
    assert!(said.contains("output of tokens at step 1") || said.contains("of layers.0."), "{said}");
    // Also where the last step is the one that spoils the model, and nothing but the held-out part shows it.
    let said = bad(&["--text", &text, "--steps", "1", "--recipe", "bf16", "--lr", "1e38", "--quiet"]);
    assert!(
        said.contains("error: bf16, seed 1: held-out text: step 1, loss NaN: the first tensor that is not finite is"),
        "{said}"
    );
}

#[test]
fn what_is_wrong_is_said_with_what_to_change() {
    let folder = Folder::new("wrong");
    let (text, kept) = (folder.text(), folder.path("kept"));
    let text = ["--text", text.as_str(), "--quiet"];
    let says = |args: &[&str], expected: &str| {
        let said = bad(args);
        assert!(said.contains(expected), "{args:?}: {said}");
    };
    says(&["--text", &folder.path("none.txt")], "none.txt: No such file");
    std::fs::write(folder.0.join("short.txt"), "too short").unwrap();
    says(&["--text", &folder.path("short.txt")], "the text has 9 tokens, too few");
    says(&[&text[..], &["--heads", "5"]].concat(), "--heads: expected a number that divides --width 32, got 5");
    says(&[&text[..], &["--steps", "0"]].concat(), "--steps: expected at least 1");
    says(&[&text[..], &["--seeds", "0"]].concat(), "--seeds: expected at least 1");
    says(&[&text[..], &["--batch", "18446744073709551615"]].concat(), "--batch: expected at most 1048576");
    says(&[&text[..], &["--report", &folder.path("none/page.html")]].concat(), "there is no folder");
    says(&["--merge", "x.json", "--seeds", "4"], "cannot be used with");
    says(&[&text[..], &["--lr=-1"]].concat(), "--lr: expected a number above 0");
    says(&[&text[..], &["--recipe", "nvfp5"]].concat(), "--recipe nvfp5: no such file, and unknown preset 'nvfp5'");
    says(&[&text[..], &["--vocab", "7"]].concat(), "expected bytes, or a number of tokens");
    let tiles = "linear_qkv:input, 20 × 32 as nvfp4(hadamard): the dimension that the Hadamard transform runs along: expected a multiple of 16";
    says(&[&text[..], &["--context", "10"]].concat(), tiles);
    says(&[&text[..], &["--resume"]].concat(), "--checkpoint");

    let short = folder.path("short.txt");
    says(&[&text[..], &["--checkpoint", &short]].concat(), "error: --checkpoint ");
    says(&[&text[..], &["--checkpoint", &short]].concat(), "short.txt: this is a file; name a folder");
    let inside = format!("{short}/kept");
    says(&[&text[..], &["--checkpoint", &inside]].concat(), "short.txt/kept: Not a directory");

    let run = [&text[..], &["--recipe", "nvfp4", "--checkpoint", &kept]].concat();
    good(&[&run[..], &["--steps", "3"]].concat());
    says(&[&run[..], &["--steps", "3"]].concat(), "it already holds a checkpoint; continue it with --resume");
    says(&[&run[..], &["--steps", "4", "--resume"]].concat(), "made with steps = 3, but steps = 4 was asked for");
    let other = [&run[..], &["--steps", "3", "--resume", "--layers", "2"]].concat();
    says(&other, "nvfp4-seed-1: made with layers = 1, but layers = 2 was asked for");

    let file = Path::new(&kept).join("nvfp4-seed-1/training.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let at = bytes.windows(13).position(|window| window == b"\"version\":\"1\"").unwrap();
    bytes[at + 11] = b'9';
    std::fs::write(&file, bytes).unwrap();
    says(&[&run[..], &["--steps", "3", "--resume"]].concat(), "expected version '1', got '9'");
}

#[test]
fn models_that_no_memory_holds_are_refused_before_they_are_made() {
    for (sizes, expected) in [
        (["--width", "65536", "--heads", "65536"], "a run needs at least"),
        (["--context", "1048576", "--heads", "16"], "a run needs at least"),
        (["--layers", "2000", "--width", "32"], "--layers: expected at most 1024, got 2000"),
        (["--batch", "1048577", "--width", "32"], "--batch: expected at most 1048576"),
    ] {
        let said = bad(&[&sizes[..], &["--steps", "1"]].concat());
        assert!(said.contains(expected), "{sizes:?}: {said}");
    }
}

#[test]
fn results_with_losses_that_are_no_numbers_are_not_merged() {
    let dir = Folder::new("infinite");
    let results = good(&["--text", &dir.text(), "--steps", "1", "--recipe", "bf16", "--json", "--quiet"]);
    let mut results: Value = serde_json::from_str(&results).unwrap();
    results["runs"][0]["held_out"][0]["loss"] = 1e39.into();
    std::fs::write(dir.path("infinite.json"), results.to_string()).unwrap();
    let output =
        Command::new(env!("CARGO_BIN_EXE_nvfp4")).args(["train", "--merge", &dir.path("infinite.json")]).output();
    let said = String::from_utf8(output.unwrap().stderr).unwrap();
    assert!(said.contains("infinite.json: bf16 from seed 1 has the loss inf"), "{said}");
}
