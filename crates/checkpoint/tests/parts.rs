//! Conversions in parts: the bytes of one process, whatever is written, and what is refused.

mod converted;
mod generated;

use converted::*;
use generated::*;
use nvfp4::Precision;
use nvfp4_checkpoint::*;
use safetensors::Dtype;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

fn part(source: &Path, target: &Path, settings: &Settings, index: usize, of: usize) -> Result<PartSummary> {
    let part = Portion::new(index, of).unwrap();
    convert_part(source, target, settings, part, &(), &AtomicBool::new(false))
}

fn end(source: &Path, target: &Path, settings: &Settings) -> Result<Summary> {
    finish(source, target, settings, &(), &AtomicBool::new(false))
}

/// The files of a folder, or a file, by name.
fn read(path: &Path) -> BTreeMap<String, Vec<u8>> {
    if path.is_dir() { contents(path) } else { BTreeMap::from([(String::new(), fs::read(path).unwrap())]) }
}

/// Names of what is in a folder.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Experts of MXFP4, which are written column by column.
fn experts(path: &Path) {
    let named = |name: &str| format!("model.layers.0.mlp.experts.{name}");
    let mut tensors = Tensors::new();
    for (n, name) in ["gate_up_proj", "down_proj"].into_iter().enumerate() {
        let bytes = |len: usize, low: u8| (0..len).map(|i| low + (i * 37 + n) as u8 % 7).collect::<Vec<u8>>();
        let blocks = Tensor { dtype: Dtype::U8, shape: vec![3, 64, 2, 16], bytes: bytes(3 * 64 * 2 * 16, 1) };
        let scales = Tensor { dtype: Dtype::U8, shape: vec![3, 64, 2], bytes: bytes(3 * 64 * 2, 120) };
        tensors.insert(named(&format!("{name}_blocks")), blocks);
        tensors.insert(named(&format!("{name}_scales")), scales);
    }
    folder(path, &[tensors], &json!({}));
}

/// Each target form from each source that it has an own way for, in fewer parts than files, in more
/// than files and in more than weights; each order is another one, and every third part runs twice.
#[test]
fn every_target_has_the_bytes_of_one_process() {
    let dir = Folder::new();
    let at = |name: &str| dir.join(name);
    folder(&at("llama"), &llama(Dtype::BF16), &llama_config());
    experts(&at("experts"));
    for_llama_cpp::source(&at("qwen"), "Qwen3MoeForCausalLM", 3);
    run(&at("llama"), &at("packed"), &Settings { acts: Acts::Constant(0.5), ..to(Target::ModelOpt) }).unwrap();
    let small = |target| Settings { shards: Shards::AtMost(8_000), ..to(target) };
    let (preset, rules) = Rules::preset("mlp+fp8").unwrap();
    let mixed = Settings { selection: Selection { preset, rules, ..Selection::default() }, ..small(Target::ModelOpt) };
    let cases = [
        ("llama", small(Target::ModelOpt)),
        ("llama", Settings { acts: Acts::Constant(2.0), kv: KvCache::Fp8Cast, ..to(Target::ModelOpt) }),
        ("llama", Settings { shards: Shards::AsSource, ..to(Target::CompressedTensors) }),
        ("llama", Settings { scale: ScaleChoice::FourOverSix, ..small(Target::CompressedTensors) }),
        ("experts", to(Target::ModelOpt)),
        ("packed", small(Target::CompressedTensors)),
        ("packed", small(Target::Plain(Precision::Bf16))),
        ("qwen", to(Target::Gguf)),
        ("llama", to(Target::ComfyUi)),
        ("llama", mixed),
    ];
    for (n, (source, settings)) in cases.into_iter().enumerate() {
        let ending = match settings.target {
            Target::Gguf => ".gguf",
            Target::ComfyUi => ".safetensors",
            _ => "",
        };
        let (alone, target) = (at(&format!("alone{n}{ending}")), at(&format!("out{n}{ending}")));
        let source = at(source);
        let one = run(&source, &alone, &settings).unwrap();
        for of in [1, 3, 8, 40] {
            // A step that has no factor in common with the number of parts meets each of them once.
            for turn in 0..of {
                let index = (turn * 7 + n) % of;
                let more = Settings { threads: 1 + turn % 3, memory: 1 << (20 + turn % 8), ..settings.clone() };
                for _ in 0..1 + usize::from(index % 3 == 0) {
                    part(&source, &target, &more, index, of).unwrap();
                }
            }
            let summary = end(&source, &target, &settings).unwrap();
            assert!(read(&target) == read(&alone), "case {n} in {of} parts");
            let modules = |summary: &Summary| {
                let all = summary.quantized.iter().chain(&summary.rescaled).chain(&summary.decoded);
                all.map(|w| (w.module.clone(), w.measure.elements, w.measure.zeroed)).collect::<Vec<_>>()
            };
            assert_eq!(modules(&summary), modules(&one), "case {n} in {of} parts");
            assert_eq!((summary.after, &summary.files, &summary.findings), (one.after, &one.files, &one.findings));
            match target.is_dir() {
                true => fs::remove_dir_all(&target).unwrap(),
                false => fs::remove_file(&target).unwrap(),
            }
        }
    }
    assert!(names(&dir.join("")).iter().all(|name| !name.contains(".part")), "nothing is left behind");
}

#[test]
fn what_parts_have_to_do_is_all_there_is() {
    let dir = Folder::new();
    folder(&dir.join("in"), &llama(Dtype::BF16), &llama_config());
    let checkpoint = Checkpoint::open(&dir.join("in")).unwrap();
    let model = Model::new(&checkpoint).unwrap();
    let settings = to(Target::ModelOpt);
    let plan = Plan::new(&model, &settings.selection, settings.target).unwrap();
    let alone = run(&dir.join("in"), &dir.join("out"), &settings).unwrap();
    for of in [1, 2, 5, 30] {
        let shares = shares(&model, &plan, &settings, of).unwrap();
        assert_eq!(shares.iter().map(|s| s.part).collect::<Vec<_>>(), Portion::all(of).collect::<Vec<_>>());
        assert_eq!(shares.iter().map(|s| s.read).sum::<u64>(), checkpoint.byte_len());
        assert_eq!(shares.iter().map(|s| s.quantized).sum::<usize>(), 14);
        assert_eq!(shares.iter().map(|s| s.files).sum::<usize>(), usize::from(of == 1));
        let written: u64 = shares.iter().map(|s| s.written).sum();
        assert!(if of == 1 { written > alone.after } else { written == alone.after }, "{of}: {written}");
        assert_eq!(shares.iter().any(|s| s.shared > 0), of > 1, "gate and up of layer 0 lie far from each other");
    }
}

/// Both processes do all of part 1 at the same time, as after a retry on another machine.
#[test]
fn a_part_may_be_made_by_two_processes_at_once() {
    struct Twin<F>(AtomicBool, F);
    impl<F: Fn() + Sync> Observer for Twin<F> {
        fn finished(&self, _: &Finished) {
            if !self.0.swap(true, Ordering::Relaxed) {
                (self.1)();
            }
        }
    }
    let dir = Folder::new();
    let (source, target) = (dir.join("in"), dir.join("out"));
    folder(&source, &llama(Dtype::BF16), &llama_config());
    for shards in [Shards::AtMost(8_000), Shards::AtMost(1_000_000)] {
        let settings = Settings { shards, threads: 1, ..to(Target::ModelOpt) };
        run(&source, &dir.join("alone"), &settings).unwrap();
        let other = Mutex::new(None);
        let twin = Twin(AtomicBool::new(false), || {
            *other.lock().unwrap() = Some(part(&source, &target, &settings, 1, 2).unwrap().outcome);
            assert!(names(&dir.join("out.parts")).iter().any(|name| name.starts_with("part-1-of-2-")), "it lives");
        });
        let stop = AtomicBool::new(false);
        convert_part(&source, &target, &settings, Portion::new(1, 2).unwrap(), &twin, &stop).unwrap();
        assert_eq!(*other.lock().unwrap(), Some(Outcome::Written));
        part(&source, &target, &settings, 0, 2).unwrap();
        end(&source, &target, &settings).unwrap();
        assert!(contents(&target) == contents(&dir.join("alone")));
        fs::remove_dir_all(&target).unwrap();
        fs::remove_dir_all(dir.join("alone")).unwrap();
    }
}

#[test]
fn parts_that_are_missing_or_do_not_belong_together_are_named() {
    let dir = Folder::new();
    let (source, target) = (dir.join("in"), dir.join("out"));
    folder(&source, &llama(Dtype::BF16), &llama_config());
    let settings = Settings { shards: Shards::AtMost(8_000), ..to(Target::ModelOpt) };
    let said = |result: Result<PartSummary>| result.unwrap_err().to_string();
    let finished = || end(&source, &target, &settings).unwrap_err().to_string();
    assert!(finished().contains("there are no parts of a conversion to it"), "{}", finished());
    part(&source, &target, &settings, 0, 4).unwrap();
    assert!(finished().contains("these parts are missing or not complete: 1/4, 2/4, 3/4; make them"), "{}", finished());
    for index in [3, 1] {
        part(&source, &target, &settings, index, 4).unwrap();
    }
    assert!(finished().contains("this part is missing or not complete: 2/4; make it"), "{}", finished());
    assert!(!dir.join("out.partial").exists(), "nothing is written before all are there");

    let mse = Settings { scale: ScaleChoice::Mse, ..settings.clone() };
    let other = said(part(&source, &target, &mse, 2, 4));
    assert!(other.contains(r#"part 0/4 in "#) && other.contains(r#"'scale' "Max", and here it is "Mse""#), "{other}");
    let other = end(&source, &target, &mse).unwrap_err().to_string();
    assert!(other.contains(r#"'scale' "Max", and here it is "Mse""#), "{other}");
    let other = said(part(&source, &target, &settings, 2, 5));
    assert!(other.contains("'parts' 4, and here it is 5"), "{other}");

    // Another version of the program, as its journal would say it.
    let journal = dir.join("out.parts/part-3-of-4.json");
    let text = fs::read_to_string(&journal).unwrap();
    let mut json: Value = serde_json::from_str(&text).unwrap();
    json["request"]["version"] = json!("0.0.1");
    fs::write(&journal, json.to_string()).unwrap();
    let other = said(part(&source, &target, &settings, 2, 4));
    assert!(other.contains(r#"part 3/4 in "#) && other.contains(r#"'version' "0.0.1", and here it is "#), "{other}");
    fs::write(&journal, text).unwrap();

    // A file of a part that somebody cut.
    let file = names(&dir.join("out.parts")).into_iter().find(|name| name.ends_with(".safetensors")).unwrap();
    let bytes = fs::read(dir.join("out.parts").join(&file)).unwrap();
    fs::write(dir.join("out.parts").join(&file), &bytes[..100]).unwrap();
    assert!(finished().contains("0/4, 2/4"), "{}", finished());

    let config = fs::read_to_string(source.join("tokenizer.json")).unwrap();
    fs::write(source.join("tokenizer.json"), format!("{config} ")).unwrap();
    let other = said(part(&source, &target, &settings, 2, 4));
    assert!(other.contains("another 'tokenizer.json' in the source"), "{other}");

    fs::create_dir_all(dir.join("other.parts/mine")).unwrap();
    let other = said(part(&source, &dir.join("other"), &settings, 0, 1));
    assert!(other.contains("other.parts is in the way and holds no parts of a conversion"), "{other}");
    fs::create_dir_all(dir.join("full")).unwrap();
    fs::write(dir.join("full/mine"), "").unwrap();
    assert!(matches!(part(&source, &dir.join("full"), &settings, 0, 1), Err(Error::TargetExists { .. })));
    assert!(!dir.join("full.parts").exists());
}

/// What was stopped leaves a folder behind, which the next process of the same part removes.
#[test]
fn what_a_stopped_part_leaves_behind_is_removed() {
    struct Stop<'a>(&'a AtomicBool);
    impl Observer for Stop<'_> {
        fn finished(&self, _: &Finished) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let dir = Folder::new();
    let (source, target, settings) = (dir.join("in"), dir.join("out"), to(Target::ModelOpt));
    folder(&source, &llama(Dtype::BF16), &llama_config());
    let folders = || names(&dir.join("out.parts")).into_iter().filter(|name| !name.contains('.')).count();
    for index in [0, 1, 0] {
        let (stop, part) = (AtomicBool::new(false), Portion::new(index, 2).unwrap());
        let one = Settings { threads: 1, ..settings.clone() };
        let stopped = convert_part(&source, &target, &one, part, &Stop(&stop), &stop);
        assert!(matches!(stopped, Err(Error::Interrupted)));
    }
    assert_eq!(folders(), 2);
    part(&source, &target, &settings, 0, 2).unwrap();
    assert_eq!(folders(), 1);
    part(&source, &target, &settings, 1, 2).unwrap();
    assert_eq!(folders(), 0);
}
