//! What a conversion does to files that are there already, that change while it runs, or that have no room.

mod generated;

use generated::*;
use nvfp4::Precision;
use nvfp4_checkpoint::*;
use safetensors::Dtype;
use serde_json::json;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::SystemTime;

fn run(source: &Path, target: &Path, settings: &Settings) -> Result<Summary> {
    convert(source, target, settings, &(), &AtomicBool::new(false))
}

fn with(existing: Existing) -> Settings {
    Settings { existing, threads: 2, shards: Shards::AtMost(8_000), ..Settings::default() }
}

fn refused(result: Result<Summary>) -> String {
    result.unwrap_err().to_string()
}

/// A llama, and what it is converted to.
fn converted() -> (Folder, PathBuf, PathBuf) {
    let dir = Folder::new();
    let (source, target) = (dir.join("in"), dir.join("out"));
    folder(&source, &llama(Dtype::BF16), &llama_config());
    run(&source, &target, &with(Existing::Refuse)).unwrap();
    (dir, source, target)
}

#[test]
fn a_folder_with_anything_but_a_checkpoint_is_not_replaced() {
    let (dir, source, target) = converted();
    let before = contents(&target);
    // All that is in there now was written or copied, a nested folder too.
    run(&source, &target, &with(Existing::Replace)).unwrap();
    assert!(contents(&target) == before);
    for name in ["photos/p.txt", "notes.md", "1_Pooling/notes.md", ".git/config", "weights.bin", "lora.safetensors"] {
        let path = target.join(name);
        let parent = path.parent().unwrap();
        let new = !parent.exists();
        fs::create_dir_all(parent).unwrap();
        fs::write(&path, "mine").unwrap();
        let said = refused(run(&source, &target, &with(Existing::Replace)));
        let foreign = if new { name.split('/').next().unwrap() } else { name };
        assert!(said.contains(&format!("holds '{foreign}', which is not part of a checkpoint")), "{said}");
        assert!(path.exists() && !dir.join("out.partial").exists());
        if new { fs::remove_dir_all(parent).unwrap() } else { fs::remove_file(&path).unwrap() }
    }
    for (name, expected) in [
        ("folder", "without config.json and"),
        ("models", "holds 'other.safetensors'"),
        ("weights", "without config.json and"),
        ("file", "is a file"),
        ("a.gguf", "neither a GGUF file"),
    ] {
        let path = dir.join(name);
        let settings = match name {
            "folder" => {
                fs::create_dir(&path).unwrap();
                fs::write(path.join("config.json"), "{}").unwrap();
                with(Existing::Replace)
            }
            "models" | "weights" => {
                fs::create_dir(&path).unwrap();
                let name = if name == "models" { "other.safetensors" } else { "model.safetensors" };
                fs::write(path.join(name), "mine").unwrap();
                with(Existing::Replace)
            }
            _ => {
                fs::write(&path, "mine").unwrap();
                let target = if name == "file" { Target::ModelOpt } else { Target::Gguf };
                Settings { target, ..with(Existing::Replace) }
            }
        };
        if name == "a.gguf" {
            let mut config = llama_config();
            let numbers = [("num_hidden_layers", 2), ("num_attention_heads", 4), ("num_key_value_heads", 2)];
            numbers.iter().for_each(|(key, n)| config[key] = json!(n));
            (config["intermediate_size"], config["max_position_embeddings"]) = (json!(96), json!(64));
            config["rms_norm_eps"] = json!(1e-6);
            fs::write(source.join("config.json"), config.to_string()).unwrap();
            fs::remove_file(source.join("tokenizer.json")).unwrap();
        }
        let said = refused(run(&source, &path, &settings));
        assert!(said.contains(expected), "{said}");
        assert!(path.exists());
    }
}

/// Somebody puts a file into the old checkpoint while the new one is made.
#[test]
fn what_comes_into_a_checkpoint_while_it_is_replaced_stays() {
    struct Put(PathBuf);
    impl Observer for Put {
        fn finished(&self, _: &Finished) {
            fs::write(&self.0, "mine").unwrap();
        }
    }
    let (_dir, source, target) = converted();
    let put = Put(target.join("notes.md"));
    let said = refused(convert(&source, &target, &with(Existing::Replace), &put, &AtomicBool::new(false)));
    assert!(said.contains("holds 'notes.md'"), "{said}");
    fs::remove_file(&put.0).unwrap();
    run(&source, &target, &with(Existing::Resume)).unwrap();
}

#[test]
fn an_empty_folder_is_no_target_that_exists() {
    let (dir, source, target) = converted();
    fs::create_dir(dir.join("empty")).unwrap();
    run(&source, &dir.join("empty"), &with(Existing::Refuse)).unwrap();
    assert!(contents(&dir.join("empty")) == contents(&target));
}

#[test]
fn two_tensors_of_one_name_are_refused() {
    let dir = Folder::new();
    let stray = |name: &str, shape: &[usize]| {
        let mut tensors = layer(0, Dtype::BF16);
        tensors.insert(name.to_string(), random(Dtype::F32, shape, 1));
        tensors.insert("model.embed_tokens.weight".to_string(), random(Dtype::BF16, &[64, 64], 2));
        folder(&dir.join("in"), &[tensors], &{
            let mut config = llama_config();
            (config["num_hidden_layers"], config["num_attention_heads"]) = (json!(1), json!(4));
            (config["num_key_value_heads"], config["intermediate_size"]) = (json!(2), json!(96));
            (config["max_position_embeddings"], config["rms_norm_eps"]) = (json!(64), json!(1e-6));
            config
        });
        fs::remove_file(dir.join("in/tokenizer.json")).unwrap();
    };
    let name = "model.layers.0.mlp.up_proj.weight_scale";
    stray(name, &[96, 4]);
    let said = refused(run(&dir.join("in"), &dir.join("out"), &with(Existing::Refuse)));
    assert!(said.contains(&format!("already has a tensor '{name}', which the conversion would write")), "{said}");
    stray("model.layers.00.input_layernorm.weight", &[64]);
    let gguf = Settings { target: Target::Gguf, ..with(Existing::Refuse) };
    let said = refused(run(&dir.join("in"), &dir.join("out.gguf"), &gguf));
    assert!(said.contains("two tensors of the source would be 'blk.0.attn_norm.weight' in GGUF"), "{said}");
    assert!(!dir.join("out.partial").exists() && !dir.join("out.gguf.partial").exists());
}

/// Does something once, when a number of pieces has been dealt with.
struct At<F> {
    left: AtomicUsize,
    act: F,
}

impl<F: Fn() + Sync> Observer for At<F> {
    fn advance(&self, _: u64) {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            (self.act)();
        }
    }
}

#[test]
fn a_second_conversion_to_the_same_target_is_refused() {
    let (dir, source, target) = converted();
    let other = dir.join("other");
    for existing in [Existing::Refuse, Existing::Resume, Existing::Replace] {
        let said = Mutex::new(String::new());
        let second = || *said.lock().unwrap() = refused(run(&source, &other, &with(existing)));
        let first = At { left: 20.into(), act: second };
        convert(&source, &other, &with(Existing::Refuse), &first, &AtomicBool::new(false)).unwrap();
        let said = said.lock().unwrap();
        assert!(said.starts_with("another conversion is writing") && said.contains("other.partial"), "{said}");
        assert!(contents(&other) == contents(&target), "{existing:?}");
        fs::remove_dir_all(&other).unwrap();
    }
}

/// Stops a conversion when the first file is whole, and gives it.
fn stopped(source: &Path, target: &Path) -> PathBuf {
    let stop = AtomicBool::new(false);
    let partial = target.with_file_name("other.partial");
    let shards = || {
        let names = fs::read_dir(&partial).unwrap().map(|e| e.unwrap().path());
        let mut shards: Vec<PathBuf> = names.filter(|p| p.extension().is_some_and(|e| e == "safetensors")).collect();
        shards.sort();
        shards
    };
    struct Stop<'a, F>(&'a AtomicBool, F);
    impl<F: Fn() -> bool + Sync> Observer for Stop<'_, F> {
        fn finished(&self, _: &Finished) {
            if (self.1)() {
                self.0.store(true, Ordering::Relaxed);
            }
        }
    }
    let settings = Settings { threads: 1, ..with(Existing::Refuse) };
    let result = convert(source, target, &settings, &Stop(&stop, || shards().len() > 1), &stop);
    assert!(matches!(result, Err(Error::Interrupted)));
    shards()[0].clone()
}

#[test]
fn a_finished_file_that_changed_is_made_again() {
    let (dir, source, target) = converted();
    let other = dir.join("other");
    for change in ["cut", "changed", "removed"] {
        let shard = stopped(&source, &other);
        let bytes = fs::read(&shard).unwrap();
        match change {
            "cut" => fs::write(&shard, &bytes[..bytes.len() / 2]).unwrap(),
            "removed" => fs::remove_file(&shard).unwrap(),
            _ => {
                let mut changed = bytes;
                *changed.last_mut().unwrap() ^= 1;
                fs::write(&shard, changed).unwrap();
                // Clocks of file systems are coarse.
                File::options().write(true).open(&shard).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
            }
        }
        run(&source, &other, &with(Existing::Resume)).unwrap();
        assert!(contents(&other) == contents(&target), "{change}");
        fs::remove_dir_all(&other).unwrap();
    }
}

#[test]
fn a_conversion_is_not_continued_from_another_configuration_or_tokenizer() {
    let (dir, source, _) = converted();
    let other = dir.join("other");
    for name in ["config.json", "tokenizer.json"] {
        stopped(&source, &other);
        let before = fs::read_to_string(source.join(name)).unwrap();
        fs::write(source.join(name), format!("{before} ")).unwrap();
        let said = refused(run(&source, &other, &with(Existing::Resume)));
        assert!(said.contains("begun with other settings or another source"), "{said}");
        fs::remove_dir_all(dir.join("other.partial")).unwrap();
    }
}

/// Bytes may have changed from one version to the next: what one began, no other continues.
#[test]
fn a_conversion_that_another_version_began_is_not_continued() {
    let (dir, source, target) = converted();
    let (other, journal) = (dir.join("other"), dir.join("other.partial/.nvfp4-journal.json"));
    for (key, of_before) in [("version", json!("0.0.9")), ("scale_offsets", json!([0, -1, 1, -2, 2, -3, -4]))] {
        stopped(&source, &other);
        let ours = fs::read(&journal).unwrap();
        let mut value: serde_json::Value = serde_json::from_slice(&ours).unwrap();
        assert!(value["request"][key].take() != serde_json::Value::Null);
        value["request"][key] = of_before;
        fs::write(&journal, value.to_string()).unwrap();
        let said = refused(run(&source, &other, &with(Existing::Resume)));
        assert!(said.contains("begun with other settings"), "{key}: {said}");
        fs::write(&journal, ours).unwrap();
        run(&source, &other, &with(Existing::Resume)).unwrap();
        assert!(contents(&other) == contents(&target));
        fs::remove_dir_all(&other).unwrap();
    }
}

#[test]
fn a_source_that_changes_while_it_is_read_is_an_error() {
    let (dir, source, _) = converted();
    let file = source.join("model-00002-of-00002.safetensors");
    let touch = || File::options().write(true).open(&file).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
    for pieces in [1, 20] {
        let other = dir.join(&format!("other{pieces}"));
        File::options().write(true).open(&file).unwrap().set_modified(SystemTime::now()).unwrap();
        let observer = At { left: pieces.into(), act: touch };
        let said = refused(convert(&source, &other, &with(Existing::Refuse), &observer, &AtomicBool::new(false)));
        assert!(said.contains("00002.safetensors changed while it was read"), "{said}");
        assert!(!other.exists());
    }
}

/// What cannot be read back never gets its name, whoever calls.
#[test]
fn a_result_that_cannot_be_read_back_has_no_name() {
    let (dir, source, target) = converted();
    let (other, partial) = (dir.join("other"), dir.join("other.partial"));
    struct Cut(PathBuf);
    impl Observer for Cut {
        fn finished(&self, _: &Finished) {
            for shard in fs::read_dir(&self.0).unwrap().map(|e| e.unwrap().path()) {
                if shard.extension().is_some_and(|e| e == "safetensors") {
                    fs::write(shard, "cut").unwrap();
                }
            }
        }
    }
    let said =
        refused(convert(&source, &other, &with(Existing::Refuse), &Cut(partial.clone()), &AtomicBool::new(false)));
    assert!(said.starts_with("the result cannot be read back: ") && said.contains("truncated"), "{said}");
    assert!(!other.exists() && partial.exists());
    run(&source, &other, &with(Existing::Resume)).unwrap();
    assert!(contents(&other) == contents(&target));
}

/// Somebody puts a link where a part is written: what it leads to is not touched.
#[cfg(unix)]
#[test]
fn a_link_in_an_unfinished_folder_leads_to_nothing() {
    let (dir, source, target) = converted();
    let (other, kept) = (dir.join("other"), dir.join("kept"));
    stopped(&source, &other);
    fs::write(&kept, "mine").unwrap();
    for name in ["config.json", "tokenizer.json", ".nvfp4-journal.json", "model-00002-of-00002.safetensors"] {
        let part = dir.join("other.partial").join(format!("{name}.part"));
        let _ = fs::remove_file(&part); // one that was not finished
        std::os::unix::fs::symlink(&kept, part).unwrap();
    }
    run(&source, &other, &with(Existing::Resume)).unwrap();
    assert_eq!(fs::read_to_string(&kept).unwrap(), "mine");
    let whole =
        |path: &Path| contents(path).into_iter().filter(|(name, _)| !name.ends_with(".part")).collect::<Vec<_>>();
    assert!(whole(&other) == whole(&target));
}

#[cfg(unix)]
#[test]
fn a_linked_folder_in_an_unfinished_one_is_refused() {
    let (dir, source, _) = converted();
    fs::create_dir_all(source.join("1_Pooling")).unwrap();
    fs::write(source.join("1_Pooling/config.json"), "{}").unwrap();
    let (other, outside) = (dir.join("other"), dir.join("outside"));
    stopped(&source, &other);
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("config.json"), "mine").unwrap();
    let link = dir.join("other.partial/1_Pooling");
    let _ = fs::remove_dir_all(&link);
    std::os::unix::fs::symlink(&outside, &link).unwrap();
    let said = refused(run(&source, &other, &with(Existing::Resume)));
    assert!(said.contains("1_Pooling: a link, where a folder is expected"), "{said}");
    assert_eq!(fs::read_to_string(outside.join("config.json")).unwrap(), "mine");
}

#[test]
fn the_summary_says_what_a_check_of_the_result_found() {
    let (dir, source, _) = converted();
    let apart = Settings { selection: Selection { fuse: Fuse::Off, ..Selection::default() }, ..with(Existing::Refuse) };
    let findings = run(&source, &dir.join("apart"), &apart).unwrap().findings;
    assert!(findings.iter().any(|f| f.severity == Severity::Problem && f.text.contains("tensor scales differ")));
    let plain = Settings { target: Target::Plain(Precision::Bf16), ..with(Existing::Refuse) };
    assert_eq!(run(&dir.join("apart"), &dir.join("plain"), &plain).unwrap().findings, []);
}

/// A retry of what is done already: nothing is written, and everything compared.
#[test]
fn to_continue_what_is_finished_is_no_error() {
    let (_dir, source, target) = converted();
    let before = contents(&target);
    let summary = run(&source, &target, &with(Existing::Resume)).unwrap();
    assert_eq!((summary.outcome, summary.quantized.len()), (Outcome::AlreadyThere, 14));
    assert!(contents(&target) == before);
    let other = Settings { scale: ScaleChoice::Mse, ..with(Existing::Resume) };
    let said = refused(run(&source, &target, &other));
    assert!(said.contains("is there already, and not what this would write"), "{said}");
    assert!(contents(&target) == before);
}

#[cfg(unix)]
#[test]
fn files_that_cannot_come_along_are_refused_before_anything_is_written() {
    let (dir, source, _) = converted();
    std::os::unix::fs::symlink(dir.join("secret"), source.join("vocab.txt")).unwrap();
    fs::write(dir.join("secret"), "").unwrap();
    let said = refused(run(&source, &dir.join("other"), &with(Existing::Refuse)));
    assert!(said.contains("'vocab.txt' is a symbolic link that leads out of the folder"), "{said}");
    assert!(!dir.join("other.partial").exists());
}

/// A source of which only the header is on the disk claims more than a disk has.
#[cfg(unix)]
#[test]
fn a_disk_without_room_is_an_error_before_anything_is_written() {
    let dir = Folder::new();
    let (rows, cols) = (15u64 << 26, 1u64 << 14);
    let norm = r#""a.weight":{"dtype":"BF16","shape":[16,64],"data_offsets":[0,2048]}"#;
    let big = format!(
        r#""lm_head.weight":{{"dtype":"U8","shape":[{rows},{cols}],"data_offsets":[2048,{}]}}"#,
        2048 + rows * cols
    );
    let header = format!("{{{norm},{big}}}");
    let path = dir.join("m.safetensors");
    fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
    let len = 8 + header.len() as u64 + 2048 + rows * cols;
    File::options().write(true).open(&path).unwrap().set_len(len).unwrap();
    let said = refused(run(&path, &dir.join("out"), &with(Existing::Refuse)));
    assert!(said.contains("no space left: ") && said.contains(" MB are needed"), "{said}");
    assert!(!dir.join("out.partial").exists());
}

/// A journal is a file that can be changed: numbers that it lacks are found again.
#[test]
fn a_journal_without_the_numbers_of_a_weight_is_no_end() {
    let (dir, source, target) = converted();
    let (other, journal) = (dir.join("other"), dir.join("other.partial/.nvfp4-journal.json"));
    for change in [json!([]), json!([u32::MAX]), json!(null)] {
        stopped(&source, &other);
        let mut value: serde_json::Value = serde_json::from_slice(&fs::read(&journal).unwrap()).unwrap();
        let amaxes = value["amaxes"].as_object_mut().unwrap();
        let module = amaxes.keys().next_back().unwrap().clone();
        match change {
            serde_json::Value::Null => drop(amaxes.remove(&module)),
            change => drop(amaxes.insert(module, change)),
        }
        fs::write(&journal, value.to_string()).unwrap();
        run(&source, &other, &with(Existing::Resume)).unwrap();
        assert!(contents(&other) == contents(&target));
        fs::remove_dir_all(&other).unwrap();
    }
}

#[test]
fn a_target_may_end_in_a_dot_and_its_name_must_leave_room_for_others() {
    let (dir, source, target) = converted();
    run(&source, &dir.join("dot/."), &with(Existing::Refuse)).unwrap();
    assert!(contents(&dir.join("dot")) == contents(&target));
    let long = "n".repeat(245);
    let said = refused(run(&source, &dir.join(&long), &with(Existing::Refuse)));
    assert!(said.contains("shorten it by 1 bytes"), "{said}");
    run(&source, &dir.join(&long[1..]), &with(Existing::Refuse)).unwrap();
    run(&source, &dir.join(&long[1..]), &with(Existing::Replace)).unwrap();
}
