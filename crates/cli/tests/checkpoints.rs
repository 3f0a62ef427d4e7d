//! The commands about checkpoints, as a user runs them.

use half::bf16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, serialize_to_file};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, ExitCode, Output, Stdio};

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("nvfp4-cli-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_string_lossy().into_owned()
    }

    /// A Llama of some layers, hidden size `h`, in a folder.
    fn llama(&self, name: &str, layers: usize, h: usize) -> String {
        let mut tensors: Vec<(String, Vec<usize>)> = vec![
            ("model.embed_tokens.weight".into(), vec![64, h]),
            ("lm_head.weight".into(), vec![64, h]),
            ("model.norm.weight".into(), vec![h]),
        ];
        for l in 0..layers {
            let shapes = [
                ("self_attn.q_proj", [h, h]),
                ("self_attn.k_proj", [h / 2, h]),
                ("self_attn.v_proj", [h / 2, h]),
                ("self_attn.o_proj", [h, h]),
                ("mlp.gate_proj", [2 * h, h]),
                ("mlp.up_proj", [2 * h, h]),
                ("mlp.down_proj", [h, 2 * h]),
            ];
            tensors.extend(shapes.map(|(n, s)| (format!("model.layers.{l}.{n}.weight"), s.to_vec())));
            let norms = ["input_layernorm", "post_attention_layernorm"];
            tensors.extend(norms.map(|n| (format!("model.layers.{l}.{n}.weight"), vec![h])));
        }
        let mut state = 1u64;
        // No two weights of a layer have the same largest value.
        let mut value = |factor: f32| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let x = (state >> 40) as f32 / (1 << 23) as f32 - 1.0;
            bf16::from_f32(0.05 * factor * x * x * x)
        };
        let data: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
            .into_iter()
            .enumerate()
            .map(|(i, (n, s))| {
                let factor = 1.0 + i as f32 / 16.0;
                let bytes = (0..s.iter().product::<usize>()).flat_map(|_| value(factor).to_le_bytes()).collect();
                (n, s, bytes)
            })
            .collect();
        let views = data.iter().map(|(n, s, b)| (n, TensorView::new(Dtype::BF16, s.clone(), b).unwrap()));
        std::fs::create_dir_all(self.0.join(name)).unwrap();
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        serialize_to_file(views, Some(metadata), &self.0.join(name).join("model.safetensors")).unwrap();
        let config = json!({ "architectures": ["LlamaForCausalLM"], "hidden_size": h, "num_hidden_layers": layers,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 2 * h, "vocab_size": 64,
            "max_position_embeddings": 128, "rms_norm_eps": 1e-6 });
        std::fs::write(self.0.join(name).join("config.json"), config.to_string()).unwrap();
        self.path(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    command.args(args);
    command
}

fn nvfp4(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap() + &String::from_utf8(output.stderr.clone()).unwrap()
}

fn ok(args: &[&str]) -> String {
    let output = nvfp4(args);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output));
    String::from_utf8(output.stdout).unwrap()
}

fn json_of(args: &[&str]) -> Value {
    serde_json::from_str(&ok(args)).unwrap()
}

fn contents(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(path).unwrap().map(|e| e.unwrap().path());
    entries.map(|p| (p.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(&p).unwrap())).collect()
}

#[test]
fn convert_verify_inspect_diff_and_back() {
    let dir = Folder::new("tour");
    let source = dir.llama("in", 2, 64);
    let (out, ct, back) = (dir.path("out"), dir.path("ct"), dir.path("back"));

    let plan = ok(&["plan", &source]);
    assert!(plan.contains("nvfp4 (q/k/v)") && plan.contains("output head") && plan.contains("total "), "{plan}");
    assert_eq!(ok(&["convert", &source, &out, "--dry-run"]), plan);
    let weights = json_of(&["plan", &source, "--json"])["weights"].as_array().unwrap().len();
    assert_eq!(weights, 16);

    let converted = nvfp4(&["convert", &source, &out]);
    let printed = text(&converted);
    assert_eq!(converted.status.code(), Some(0), "{printed}");
    for expected in ["14 weights -> NVFP4", "2 x q/k/v", "[  14/14]", "worst", "checks   ok", "vllm serve"] {
        assert!(printed.contains(expected), "{expected}: {printed}");
    }
    assert!(ok(&["verify", &out]).contains("14 NVFP4 weights (ModelOpt), for vLLM"));
    let failed = nvfp4(&["verify", &out, "--for", "transformers"]);
    assert_eq!(failed.status.code(), Some(1), "{}", text(&failed));
    assert!(text(&failed).contains("--to compressed-tensors"));
    let failed = nvfp4(&["verify", &source, "--json"]);
    assert_eq!(failed.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&failed.stdout).unwrap();
    assert_eq!(report["findings"][0]["severity"], "problem");

    ok(&["convert", &out, &ct, "--to", "compressed-tensors", "-q"]);
    ok(&["verify", &ct, "--for", "transformers"]);
    let inspected = ok(&["inspect", &ct]);
    assert!(inspected.contains("dialect  compressed-tensors") && inspected.contains("entropy"), "{inspected}");
    assert_eq!(json_of(&["inspect", &out, "--json"])["nvfp4_weights"], 14);
    let block = ok(&["inspect", &out, "--tensor", "layers.0.mlp.up_proj", "--block", "3,1"]);
    assert!(block.contains("columns 16..32") && block.contains("scale    0x"), "{block}");
    assert_eq!(nvfp4(&["inspect", &out, "--tensor", "up_proj"]).status.code(), Some(3));

    let diff = ok(&["diff", &source, &out, "--top", "3"]);
    assert!(diff.contains("… and 11 more") && diff.contains("summary  14 weights"), "{diff}");
    let error = json_of(&["diff", &source, &out, "--json"])["total"]["relerr"].as_f64().unwrap();
    assert!((0.05..0.15).contains(&error), "{error}");
    assert!(ok(&["diff", &out, &out, "--bits"]).contains("identical"));
    assert_eq!(nvfp4(&["diff", &out, &ct, "--bits"]).status.code(), Some(1));

    let lone = dir.path("lone.safetensors");
    std::fs::copy(format!("{out}/model.safetensors"), &lone).unwrap();
    let refused = nvfp4(&["diff", &source, &lone]);
    assert!(refused.status.code() == Some(3) && text(&refused).contains("--from modelopt"), "{}", text(&refused));
    assert_eq!(json_of(&["diff", &source, &lone, "--from", "modelopt", "--json"])["total"]["relerr"], error);
    let both = nvfp4(&["diff", &out, &lone, "--from", "modelopt", "--bits"]);
    assert!(both.status.code() == Some(2) && text(&both).contains("cannot be used with"), "{}", text(&both));
    // A damaged checkpoint that says whose it is is refused for what is wrong with it, whatever --from says.
    let damaged = dir.path("damaged");
    std::fs::create_dir(&damaged).unwrap();
    for file in ["config.json", "hf_quant_config.json"] {
        std::fs::copy(format!("{out}/{file}"), format!("{damaged}/{file}")).unwrap();
    }
    let bytes = std::fs::read(&lone).unwrap();
    let name = b"up_proj.weight_scale\"";
    let at = bytes.windows(name.len()).position(|window| window == name).unwrap();
    let renamed = [&bytes[..at], b"up_proj.weight_other\"", &bytes[at + name.len()..]].concat();
    std::fs::write(format!("{damaged}/model.safetensors"), renamed).unwrap();
    let refused = nvfp4(&["diff", &source, &damaged, "--from", "plain"]);
    assert!(text(&refused).contains("up_proj.weight_scale' is missing"), "{}", text(&refused));

    ok(&["dequant", &out, &back]);
    assert!(ok(&["inspect", &back]).contains("dialect  not quantized"));
    let again = json_of(&["diff", &out, &back, "--json"])["total"]["relerr"].as_f64().unwrap();
    assert!(again < 0.004, "one rounding to BF16: {again}");
    let config: Value = serde_json::from_slice(&std::fs::read(format!("{back}/config.json")).unwrap()).unwrap();
    assert_eq!(config["hidden_size"], 64);
    assert_eq!(config.get("quantization_config"), None);
}

#[test]
fn dequant_writes_the_type_that_is_asked_for() {
    let dir = Folder::new("dtype");
    let (source, packed) = (dir.llama("in", 1, 64), dir.path("packed"));
    ok(&["convert", &source, &packed, "-q"]);
    for (dtype, name) in [("bf16", "BF16"), ("f16", "F16"), ("f32", "F32")] {
        let plain = dir.path(dtype);
        let printed = ok(&["dequant", &packed, &plain, "--dtype", dtype]);
        assert!(printed.contains(&format!("7 weights decoded to {name}")), "{printed}");
        let weight = ok(&["inspect", &plain, "--tensor", "layers.0.mlp.up_proj"]);
        assert!(weight.contains(&format!("128x64  {name}\n")), "{weight}");
    }
    let exact = json_of(&["diff", &packed, &dir.path("f32"), "--json"])["total"]["relerr"].as_f64().unwrap();
    assert_eq!(exact, 0.0, "F32 holds every decoded value");
    let wrong = nvfp4(&["dequant", &packed, &dir.path("f8"), "--dtype", "f8"]);
    assert!(wrong.status.code() == Some(2) && text(&wrong).contains("bf16, f16, f32"), "{}", text(&wrong));
}

#[test]
fn verbose_says_what_happens_to_every_weight_and_why() {
    let dir = Folder::new("verbose");
    let (source, packed, plain) = (dir.llama("in", 1, 64), dir.path("packed"), dir.path("plain"));
    let said = text(&nvfp4(&["convert", &source, &packed, "-v"]));
    for expected in [
        "[   9/9]",
        "lm_head  64x64  keep: output head",
        "model.embed_tokens  64x64  keep: embedding",
        "q_proj  64x64  nvfp4, one tensor scale for q/k/v  8.19 kB -> 2.31 kB  relerr 0.",
    ] {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    let said = text(&nvfp4(&["dequant", &packed, &plain, "--verbose"]));
    assert!(said.contains("decode: NVFP4") && said.contains("lm_head  64x64  keep: not quantized"), "{said}");
    let both = nvfp4(&["convert", &source, &dir.path("no"), "-q", "-v"]);
    assert!(both.status.code() == Some(2) && text(&both).contains("cannot be used with"), "{}", text(&both));

    let said = ok(&["inspect", &packed, "-v"]);
    let line = said.lines().find(|l| l.contains("layers.0.mlp.up_proj")).unwrap();
    assert!(line.contains("128x64  NVFP4") && line.contains(" to 0x7e") && line.ends_with("gate/up"), "{line}");
    assert!(!ok(&["inspect", &packed]).contains("up_proj"));
    let report = json_of(&["inspect", &packed, "--verbose", "--json"]);
    assert_eq!(report["weights"].as_array().unwrap().len(), 9);
    let file = dir.path("m.gguf");
    ok(&["convert", &source, &file, "--to", "gguf", "-q"]);
    assert!(ok(&["inspect", &file, "-v"]).contains("blk.0.ffn_up.weight"));
}

#[test]
fn different_scales_in_a_fused_group_are_found_and_fixed() {
    let dir = Folder::new("fix");
    let (source, apart, kept) = (dir.llama("in", 2, 64), dir.path("apart"), dir.path("kept"));
    let (fixed, page) = (dir.path("fixed"), dir.path("page.html"));
    let made = nvfp4(&["convert", &source, &apart, "-q", "--fuse", "off"]);
    assert!(made.status.code() == Some(1) && text(&made).contains("tensor scales differ"), "{}", text(&made));
    for command in [vec!["verify", &apart], vec!["inspect", &apart], vec!["convert", &apart, &kept, "-q"]] {
        let said = text(&nvfp4(&command));
        assert!(said.contains("[fix: nvfp4 convert --fix-scales]"), "{command:?}: {said}");
    }
    let plan = ok(&["plan", &apart, "--fix-scales"]);
    assert!(plan.contains("rescale (q/k/v)") && plan.contains("relabel (gate/up)"), "{plan}");
    let printed = ok(&["convert", &apart, &fixed, "-q", "--fix-scales", "--report", &page]);
    let sentence = "6 weights got the tensor scale of what they are joined with: 0 exactly, 6 requantized (relerr 0.0";
    assert!(printed.contains(&format!("fixed    {sentence}")) && printed.contains("checks   ok"), "{printed}");
    assert!(std::fs::read_to_string(&page).unwrap().contains(sentence));
    ok(&["verify", &fixed]);
    let error = json_of(&["diff", &source, &fixed, "--json"])["total"]["relerr"].as_f64().unwrap();
    assert!(error < 0.15, "{error}");
    let again = ok(&["convert", &fixed, &dir.path("again"), "-q", "--fix-scales"]);
    assert!(again.contains("fixed    nothing: no joined NVFP4 weights differ in their tensor scale"), "{again}");
}

#[test]
fn a_gguf_file_is_written_inspected_and_verified() {
    let dir = Folder::new("gguf");
    let source = dir.llama("in", 2, 64);
    let (out, page) = (dir.path("out.gguf"), dir.path("page.html"));
    assert!(ok(&["plan", &source, "--to", "gguf"]).contains("nvfp4 (q/k/v)"));
    let printed = ok(&["convert", &source, &out, "--to", "gguf", "-q", "--report", &page]);
    assert!(printed.contains("note     tokenizer: none") && printed.contains("next     llama-cli -m "), "{printed}");
    assert!(std::fs::read_to_string(&page).unwrap().contains("<polyline"));
    let inspected = ok(&["inspect", &out]);
    assert!(inspected.starts_with("dialect  GGUF  llama\n") && inspected.contains("14 weights, 4.5"), "{inspected}");
    let report = json_of(&["inspect", &out, "--json"]);
    assert_eq!((&report["dialect"], &report["nvfp4_weights"]), (&json!("GGUF"), &json!(14)));
    let block = ok(&["inspect", &out, "--tensor", "blk.0.ffn_up", "--block", "3,1"]);
    assert!(block.contains("columns 16..32") && block.contains("scale    0x"), "{block}");
    ok(&["verify", &out, "--for", "llama.cpp"]);
    let wrong = nvfp4(&["verify", &out]);
    assert!(wrong.status.code() == Some(1) && text(&wrong).contains("--for llama.cpp"), "{}", text(&wrong));
    std::fs::write(dir.path("cut.gguf"), &std::fs::read(&out).unwrap()[..5000]).unwrap();
    let cut = nvfp4(&["inspect", &dir.path("cut.gguf")]);
    assert!(cut.status.code() == Some(3) && text(&cut).contains("truncated"), "{}", text(&cut));
}

#[cfg(unix)]
#[test]
fn lists_that_are_no_files_or_say_a_thing_twice_are_refused_at_once() {
    let dir = Folder::new("lists");
    let (source, target) = (dir.llama("in", 1, 64), dir.path("out"));
    let pipe = dir.path("pipe.json");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let endless = dir.path("endless.json");
    std::os::unix::fs::symlink("/dev/zero", &endless).unwrap();
    let [twice, tiny] = [("twice.json", r#"{"a": 1, "a": 2}"#), ("tiny.json", "")].map(|(name, text)| {
        std::fs::write(dir.path(name), text).unwrap();
        dir.path(name)
    });
    let attention = ["q_proj", "k_proj", "v_proj", "o_proj"].map(|name| format!("self_attn.{name}"));
    let mlp = ["gate_proj", "up_proj", "down_proj"].map(|name| format!("mlp.{name}"));
    let modules = attention.into_iter().chain(mlp).map(|name| format!("model.layers.0.{name}"));
    let amaxes: BTreeMap<String, f64> = modules.map(|module| (module, 1e-44)).collect();
    let gguf = dir.path("out.gguf");
    std::fs::write(&tiny, serde_json::to_string(&amaxes).unwrap()).unwrap();
    let (special, small) = ("where a file is expected", "too small or too large for a float32");
    let cases: Vec<(Vec<&str>, &str)> = vec![
        (vec!["convert", &source, &target, "--acts", &pipe], special),
        (vec!["convert", &source, &target, "--acts", &endless], special),
        (vec!["convert", &source, &target, "--acts", &twice], "'a'"),
        (vec!["convert", &source, &target, "--fuse", &pipe], special),
        (vec!["plan", &source, "--fuse", &endless], special),
        (vec!["recipe", "check", &pipe], special),
        (vec!["recipe", "explain", &endless], special),
        (vec!["recipe", "explain", "nvfp4", "--model", &pipe], special),
        (vec!["train", "--recipe", &pipe], special),
        (vec!["train", "--text", &endless], special),
        (vec!["train", "--merge", &pipe], special),
        (vec!["convert", &source, &target, "--acts", &tiny], small),
        (vec!["convert", &source, &target, "--acts", &tiny, "--to", "compressed-tensors"], small),
        (vec!["convert", &source, &gguf, "--acts", &tiny, "--to", "gguf"], small),
        (vec!["convert", &source, &target, "--acts", "const=1e-45", "--to", "compressed-tensors"], "no normal float32"),
        (vec!["convert", &source, &target, "--acts", "const=3e38"], "no normal float32"),
    ];
    for (args, expected) in cases {
        let output = nvfp4(&args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{args:?}: {error}");
        assert!(error.contains(expected), "{args:?}: {error}");
        assert!(!Path::new(&target).exists() && !Path::new(&gguf).exists(), "{args:?}");
    }
}

#[test]
fn mistakes_exit_with_2_or_3_and_name_the_fix() {
    let dir = Folder::new("mistakes");
    let source = dir.llama("in", 1, 64);
    let out = dir.path("out");
    for (args, message) in [
        (vec!["--skip", "nothing"], "matches no weight"),
        (vec!["--skip", "*.q_proj"], "servers join q/k/v"),
        (vec!["--scale", "4over6", "--profile", "modelopt"], "4over6 with another producer's profile"),
        (vec!["--acts", "missing.json"], "--acts missing.json"),
        (vec!["--only", "*.q_proj", "--fuse", "off", "--acts", "const=-1"], "expected a positive number"),
        (vec!["--to", "gguf"], "give the target a name that ends in .gguf"),
        (vec!["--fuse", "missing.json"], "--fuse missing.json"),
        (vec!["--fuse", "both"], "expected auto, off or a .json file"),
        (vec!["--device", "gpu"], "expected cpu, cuda or cuda:N"),
        #[cfg(not(feature = "cuda"))]
        (vec!["--device", "cuda"], "build it with `--features cuda`"),
        (vec!["--mem", "lots"], "expected a size like 5GB"),
        (vec!["--threads", "0"], "--threads: expected at least 1"),
    ] {
        let mut all = vec!["convert", &source, &out];
        all.extend(args);
        let output = nvfp4(&all);
        assert!(
            matches!(output.status.code(), Some(2 | 3)) && text(&output).contains(message),
            "{all:?}: {}",
            text(&output)
        );
        assert!(!Path::new(&out).exists());
    }
    ok(&["convert", &source, &out, "-q"]);
    let again = nvfp4(&["convert", &source, &out, "-q"]);
    assert!(again.status.code() == Some(3) && text(&again).contains("already exists"), "{}", text(&again));
    ok(&["convert", &source, &out, "-q", "--force", "--scale", "mse"]);
    assert!(ok(&["completions", "bash"]).contains("nvfp4"));
}

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
    for (signal, code) in [("-INT", 130), ("-TERM", 143)] {
        let target = dir.path(signal);
        let args = ["convert", &source, &target, "--scale", "mse", "--threads", "1", "--mem", "1MB"];
        let (mut child, mut stderr) = said(1, &args);
        Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        let mut rest = String::new();
        stderr.read_to_string(&mut rest).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(code), "{rest}");
        assert!(rest.contains("run the same command with --resume"), "{rest}");
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

#[test]
fn a_report_is_refused_before_the_conversion_and_replaces_reports_only() {
    let dir = Folder::new("report");
    let source = dir.llama("in", 1, 64);
    let (out, other, page) = (dir.path("out"), dir.path("notes.txt"), dir.path("page.html"));
    std::fs::write(&other, "mine").unwrap();
    let weights = std::fs::read(format!("{source}/model.safetensors")).unwrap();
    for (report, message) in [
        (dir.path("missing/r.html"), "there is no folder"),
        (dir.path("in"), "this is a folder"),
        (format!("{source}/model.safetensors"), "this is in the source"),
        (format!("{source}/r.html"), "this is in the source"),
        (format!("{out}/r.html"), "there is no folder"),
        (other.clone(), "there is a file that is not a report"),
    ] {
        let output = nvfp4(&["convert", &source, &out, "-q", "--report", &report]);
        assert!(output.status.code() == Some(3) && text(&output).contains(message), "{report}: {}", text(&output));
        assert!(!Path::new(&out).exists() && !Path::new(&format!("{out}.partial")).exists());
    }
    assert_eq!(std::fs::read(format!("{source}/model.safetensors")).unwrap(), weights);
    assert_eq!(std::fs::read_to_string(&other).unwrap(), "mine");
    ok(&["convert", &source, &out, "-q", "--report", &page]);
    let first = std::fs::read(&page).unwrap();
    ok(&["convert", &source, &dir.path("again"), "-q", "--report", &page]);
    let second = std::fs::read_to_string(&page).unwrap();
    assert!(second.contains(&dir.path("again")) && !String::from_utf8_lossy(&first).contains(&dir.path("again")));
    let inside = nvfp4(&["convert", &source, &out, "-q", "--force", "--report", &format!("{out}/r.html")]);
    assert!(text(&inside).contains("this is in the target"), "{}", text(&inside));
    ok(&["convert", &source, &out, "-q", "--force", "--report", &other]);
    assert_eq!(std::fs::read(&other).unwrap(), first);
}

/// A cache keeps files elsewhere and has links to them: neither is replaced by a report, whatever is forced.
#[cfg(unix)]
#[test]
fn a_report_never_takes_the_place_of_a_file_that_the_source_links_to() {
    let dir = Folder::new("links");
    std::fs::create_dir(dir.path("snapshots")).unwrap();
    std::fs::create_dir(dir.path("blobs")).unwrap();
    let source = dir.llama("snapshots/in", 1, 64);
    let (link, blob, out) = (format!("{source}/model.safetensors"), dir.path("blobs/a"), dir.path("out"));
    std::fs::rename(&link, &blob).unwrap();
    std::os::unix::fs::symlink("../../blobs/a", &link).unwrap();
    let before = std::fs::read(&blob).unwrap();
    for report in [&link, &blob] {
        let output = nvfp4(&["convert", &source, &out, "-q", "--force", "--report", report]);
        assert!(output.status.code() == Some(3) && text(&output).contains("in the source"), "{}", text(&output));
        assert!(std::fs::read(&blob).unwrap() == before && !Path::new(&out).exists());
    }
}

/// A name that would colour a terminal is shown as what it is.
#[test]
fn names_cannot_steer_a_terminal() {
    let dir = Folder::new("names");
    let (file, out) = (dir.path("m.safetensors"), dir.path("out"));
    let bytes = vec![0x3C; 16 * 64 * 2];
    let name = "model.\u{1b}[31mred.weight".to_string();
    let view = TensorView::new(Dtype::BF16, vec![16, 64], &bytes).unwrap();
    serialize_to_file([(name, view)], None, Path::new(&file)).unwrap();
    for args in [
        vec!["plan", &file],
        vec!["convert", &file, &out, "-v"],
        vec!["inspect", &out, "-v"],
        vec!["diff", &file, &out],
        vec!["inspect", &out, "--tensor", "\u{1b}[31mred"],
    ] {
        let said = text(&nvfp4(&args));
        assert!(said.contains("\\u{1b}[31mred") && !said.contains('\u{1b}'), "{args:?}: {said}");
    }
}

/// Commands in another program's process: it is not started again, and a second command finds its way.
#[test]
fn commands_can_be_called_again_and_again() {
    let dir = Folder::new("library");
    let source = dir.llama("in", 1, 64);
    let call = |words: &[&str]| {
        let words = ["nvfp4"].iter().chain(words).map(Into::into);
        nvfp4_cli::main(words, nvfp4_cli::Host::Library)
    };
    for target in [dir.path("a"), dir.path("b")] {
        assert_eq!(call(&["convert", &source, &target, "-q"]), ExitCode::SUCCESS);
    }
    let train = "train --steps 2 --layers 1 --width 16 --heads 1 --context 8 --batch 1 --threads 3 --recipe bf16 -q";
    let words: Vec<&str> = train.split(' ').collect();
    assert_eq!((call(&words), call(&words)), (ExitCode::SUCCESS, ExitCode::SUCCESS));
}

/// One safetensors file of zeros; shapes may claim anything.
fn zeros(path: &str, tensors: &[(&str, &str, &[usize])], metadata: Value) {
    let (mut header, mut data) = (serde_json::Map::from_iter([("__metadata__".to_string(), metadata)]), Vec::new());
    for (name, dtype, shape) in tensors {
        let (start, bits) = (
            data.len(),
            if *dtype == "BF16" {
                16
            } else if *dtype == "F32" {
                32
            } else {
                8
            },
        );
        let elements: usize = if shape.contains(&0) { 0 } else { shape.iter().product() };
        data.resize(start + elements * bits / 8, 0u8);
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, data.len()] });
        header.insert(name.to_string(), entry);
    }
    let header = Value::from(header).to_string();
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn names_of_any_length_are_printed_and_control_characters_are_not_obeyed() {
    let dir = Folder::new("names");
    let long = format!("{}.weight", "a".repeat(70_000));
    let (plain, hostile) = (dir.path("plain.safetensors"), "x\u{1b}[31my\rz.weight");
    zeros(&plain, &[(&long, "BF16", &[16, 32]), (hostile, "BF16", &[16, 32])], json!({}));
    for args in [&["plan", &plain][..], &["inspect", "-v", &plain], &["inspect", &plain, "--tensor", "31"]] {
        let text = ok(args);
        assert!(text.contains(r"x\u{1b}[31my\u{d}z") && !text.contains(['\u{1b}', '\r']), "{text}");
        assert!(text.contains(&long[..70_000]) || args.contains(&"--tensor"));
    }
    let other = dir.path("other.safetensors");
    zeros(&other, &[(hostile, "BF16", &[16, 16]), (&long, "BF16", &[16, 32])], json!({}));
    let differ = nvfp4(&["diff", "--bits", &plain, &other]);
    assert_eq!(differ.status.code(), Some(1));
    assert!(text(&differ).contains(r"\u{1b}[31m") && !text(&differ).contains('\u{1b}'));
    let error = text(&nvfp4(&["inspect", &plain, "--tensor", "\u{1b}[31mno"]));
    assert!(error.starts_with(r"error: --tensor \u{1b}[31mno: no such weight"), "{error}");
}

#[test]
fn weights_without_elements_are_refused_by_every_command_that_reads() {
    let dir = Folder::new("zeros");
    let (experts, fp8, swizzled) = (dir.path("e.safetensors"), dir.path("f.safetensors"), dir.path("c.safetensors"));
    let huge = 1 << 40;
    let of_experts: [(&str, &str, &[usize]); 3] =
        [("x", "U8", &[huge, 0, 0]), ("x_weight_scale", "F8_E4M3", &[huge, 0, 0]), ("x_weight_scale_2", "F32", &[1])];
    zeros(&experts, &of_experts, json!({}));
    zeros(&fp8, &[("x.weight", "F8_E4M3", &[4, 0]), ("x.weight_scale_inv", "F32", &[1, 0])], json!({}));
    let of_comfy: [(&str, &str, &[usize]); 3] =
        [("x.weight", "U8", &[4, 0]), ("x.weight_scale", "F8_E4M3", &[0]), ("x.weight_scale_2", "F32", &[])];
    zeros(&swizzled, &of_comfy, json!({ "_quantization_metadata": "{}" }));
    let out = dir.path("out");
    for (file, from) in [(&experts, &["--from", "modelopt"][..]), (&fp8, &[]), (&swizzled, &[])] {
        for command in [&["verify", file][..], &["inspect", file], &["inspect", "-v", file], &["dequant", file, &out]] {
            let output = nvfp4(&[command, from].concat());
            assert_eq!(output.status.code(), Some(3), "{}", text(&output));
            assert!(text(&output).contains("tensor 'x") && text(&output).contains("has no elements"));
        }
    }
    assert!(!Path::new(&out).exists());
}

/// A file that does not exist: the system's reason is said, and said once.
#[test]
fn errors_of_the_system_are_said_once() {
    let output = text(&nvfp4(&["inspect", "nowhere"]));
    assert_eq!(output.matches("No such file").count(), 1, "{output}");
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
