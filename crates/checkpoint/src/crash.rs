//! Conversions on a disk that stops after every possible number of operations, as if the machine
//! were switched off.

#[path = "../tests/generated/mod.rs"]
pub(super) mod generated;

use super::conversion::Task;
use super::convert::convert_on;
use super::{Checkpoint, Existing, Outcome, ScaleChoice, Settings, Shards, Summary, Target};
use crate::Result;
use generated::{Folder, Tensors, contents, folder, llama_config, random};
use nvfp4_files::durable::Disk;
use safetensors::Dtype;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// A checkpoint of two weights and a norm, which becomes two files.
pub(super) struct Case {
    pub dir: Folder,
    pub settings: Settings,
    pub target: PathBuf,
}

impl Case {
    pub fn new(target: Target) -> Self {
        let dir = Folder::new();
        let named = |name: &str, shape: &[usize], seed| (name.to_string(), random(Dtype::BF16, shape, seed));
        let mut tensors = Tensors::from([
            named("model.layers.0.mlp.up_proj.weight", &[16, 64], 1),
            named("model.layers.0.mlp.down_proj.weight", &[64, 64], 2),
            named("model.norm.weight", &[64], 3),
        ]);
        if target == Target::Gguf {
            let layer =
                |name: &str, shape: &[usize], seed| named(&format!("model.layers.0.{name}.weight"), shape, seed);
            tensors.extend([
                named("model.embed_tokens.weight", &[64, 64], 4),
                layer("self_attn.q_proj", &[64, 64], 5),
                layer("self_attn.k_proj", &[64, 64], 6),
                layer("self_attn.v_proj", &[64, 64], 7),
                layer("self_attn.o_proj", &[64, 64], 8),
                layer("mlp.gate_proj", &[64, 64], 9),
                layer("mlp.up_proj", &[64, 64], 10),
                layer("input_layernorm", &[64], 11),
                layer("post_attention_layernorm", &[64], 12),
            ]);
        }
        let mut config = llama_config();
        let gguf = [
            ("num_hidden_layers", json!(1)),
            ("num_attention_heads", json!(1)),
            ("intermediate_size", json!(64)),
            ("max_position_embeddings", json!(64)),
            ("rms_norm_eps", json!(1e-6)),
            ("tie_word_embeddings", json!(true)),
        ];
        gguf.into_iter().for_each(|(key, value)| config[key] = value);
        folder(&dir.join("in"), &[tensors], &config);
        if target == Target::Gguf {
            std::fs::remove_file(dir.join("in/tokenizer.json")).unwrap();
        }
        let target_path = dir.join(&target.extension().map_or("out".to_string(), |end| format!("out.{end}")));
        let settings = Settings { target, threads: 1, shards: Shards::AtMost(1500), ..Settings::default() };
        Case { dir, settings, target: target_path }
    }

    fn convert(&self, disk: &Disk, target: &Path, existing: Existing, scale: ScaleChoice) -> Result<Summary> {
        let settings = Settings { existing, scale, ..self.settings.clone() };
        let (source, stop) = (self.dir.join("in"), AtomicBool::new(false));
        convert_on(&Task { disk, source: &source, target, settings: &settings, observer: &(), stop: &stop })
    }

    /// What a conversion without a crash writes.
    pub fn whole(&self, scale: ScaleChoice) -> BTreeMap<String, Vec<u8>> {
        let path = self.dir.join(&format!("whole.{}", self.settings.target.extension().unwrap_or("d")));
        self.convert(&Disk::default(), &path, Existing::Refuse, scale).unwrap();
        let found = read(&path);
        remove(&path);
        found
    }

    /// What is beside the source.
    pub fn names(&self) -> Vec<String> {
        let parent = self.target.parent().unwrap();
        let names = std::fs::read_dir(parent).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.filter(|name| name != "in").collect();
        names.sort();
        names
    }
}

/// A folder's files, or a file, by name.
pub(super) fn read(path: &Path) -> BTreeMap<String, Vec<u8>> {
    if path.is_dir() { contents(path) } else { BTreeMap::from([(String::new(), std::fs::read(path).unwrap())]) }
}

pub(super) fn remove(path: &Path) {
    if path.is_dir() { std::fs::remove_dir_all(path).unwrap() } else { std::fs::remove_file(path).unwrap() }
}

/// Hidden files, which no reader sees, are the conversion's own.
fn seen(mut files: BTreeMap<String, Vec<u8>>) -> BTreeMap<String, Vec<u8>> {
    files.retain(|name, _| !name.starts_with(".nvfp4-"));
    files
}

#[test]
fn switched_off_at_any_moment_and_resumed_the_bytes_are_the_same() {
    for target in [Target::ModelOpt, Target::Gguf, Target::ComfyUi] {
        let case = Case::new(target);
        let (expected, mut crashes) = (case.whole(ScaleChoice::Max), 0);
        for operations in 0.. {
            let first = case.convert(&Disk::stops_after(operations), &case.target, Existing::Refuse, ScaleChoice::Max);
            if first.is_err() {
                crashes += 1;
                if case.target.exists() {
                    assert!(seen(read(&case.target)) == expected, "a name means whole: {operations}");
                }
                // The machine may be switched off again.
                let second =
                    case.convert(&Disk::stops_after(operations), &case.target, Existing::Resume, ScaleChoice::Max);
                if second.is_err() {
                    case.convert(&Disk::default(), &case.target, Existing::Resume, ScaleChoice::Max).unwrap();
                }
            }
            assert!(read(&case.target) == expected, "{target}: after {operations} operations");
            let name = case.target.file_name().unwrap().to_str().unwrap();
            assert_eq!(case.names(), [name], "after {operations} operations");
            let again = case.convert(&Disk::default(), &case.target, Existing::Resume, ScaleChoice::Max).unwrap();
            assert_eq!(again.outcome, Outcome::AlreadyThere);
            remove(&case.target);
            if first.is_ok() {
                break;
            }
        }
        assert!(crashes > 20, "{crashes}");
    }
}

/// At every moment the old checkpoint or the new one is there, whole; after the next run under the
/// target's name.
#[test]
fn switched_off_while_a_checkpoint_is_replaced_no_checkpoint_is_lost() {
    for target in [Target::ModelOpt, Target::Gguf, Target::ComfyUi] {
        let case = Case::new(target);
        let (old, new) = (case.whole(ScaleChoice::Max), case.whole(ScaleChoice::Mse));
        assert!(old != new);
        let mut aside = 0;
        for operations in 0.. {
            case.convert(&Disk::default(), &case.target, Existing::Replace, ScaleChoice::Max).unwrap();
            let first = case.convert(&Disk::stops_after(operations), &case.target, Existing::Replace, ScaleChoice::Mse);
            if first.is_err() {
                let moved = case.dir.join("out.replaced-1");
                if !case.target.exists() {
                    assert!(read(&moved) == old, "after {operations} operations");
                    aside += 1;
                }
                // Any command puts it right, also one that is refused.
                let refused = case.convert(&Disk::default(), &case.target, Existing::Refuse, ScaleChoice::Mse);
                assert!(refused.unwrap_err().to_string().contains("already exists"));
                let found = read(&case.target);
                assert!(found == old || found == new, "after {operations} operations");
                let resumed = case.convert(&Disk::default(), &case.target, Existing::Resume, ScaleChoice::Mse);
                match resumed {
                    Ok(_) => {}
                    // It was switched off before it had noted what it was to do.
                    Err(error) => {
                        assert!(error.to_string().contains("not what this would write"), "{operations}: {error}");
                        assert!(found == old && operations < 20, "after {operations} operations");
                        case.convert(&Disk::default(), &case.target, Existing::Replace, ScaleChoice::Mse).unwrap();
                    }
                }
            }
            assert!(read(&case.target) == new, "{target}: after {operations} operations");
            assert_eq!(case.names().len(), 1, "after {operations} operations: {:?}", case.names());
            if first.is_ok() {
                break;
            }
        }
        assert_eq!(aside, usize::from(target == Target::ModelOpt), "a crash between the two renames was among them");
    }
}

/// What nobody here made is neither removed nor in the way.
#[test]
fn a_folder_of_the_name_of_one_that_was_replaced_is_left_alone() {
    let case = Case::new(Target::ModelOpt);
    case.convert(&Disk::default(), &case.target, Existing::Refuse, ScaleChoice::Max).unwrap();
    for name in ["out.replaced", "out.replaced-1"] {
        std::fs::create_dir(case.dir.join(name)).unwrap();
        std::fs::write(case.dir.join(name).join("mine"), "").unwrap();
    }
    case.convert(&Disk::default(), &case.target, Existing::Replace, ScaleChoice::Mse).unwrap();
    assert_eq!(case.names(), ["out", "out.replaced", "out.replaced-1"]);
    assert!(case.dir.join("out.replaced/mine").exists() && case.dir.join("out.replaced-1/mine").exists());
    Checkpoint::open(&case.target).unwrap();
}
