//! Conversions in parts on disks that stop: each part, and what makes a checkpoint of them.

use super::conversion::Task;
use super::crash::generated::{Folder, Tensors, contents, folder, llama_config, tensor, values};
use super::crash::{Case, read, remove};
use super::parts::{PartSummary, finish_on, part_on};
use super::{Existing, Outcome, Portion, ScaleChoice, Settings, Shards, Summary, Target, convert, shares};
use crate::{Checkpoint, Error, Model, Plan, Result};
use nvfp4_files::durable::Disk;
use safetensors::Dtype;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

impl Case {
    fn task<R>(&self, disk: &Disk, existing: Existing, act: impl FnOnce(&Task<'_>) -> R) -> R {
        let settings = Settings { existing, ..self.settings.clone() };
        let (source, stop) = (self.dir.join("in"), AtomicBool::new(false));
        act(&Task { disk, source: &source, target: &self.target, settings: &settings, observer: &(), stop: &stop })
    }

    fn part(&self, disk: &Disk, index: usize, of: usize) -> Result<PartSummary> {
        self.task(disk, Existing::Refuse, |task| part_on(task, Portion::new(index, of).unwrap()))
    }

    fn finish(&self, disk: &Disk, existing: Existing) -> Result<Summary> {
        self.task(disk, existing, finish_on)
    }
}

/// Two files in two parts are two whole files; one file in three parts is put together.
#[test]
fn parts_that_are_switched_off_at_any_write_have_the_bytes_of_one_process() {
    for (target, parts) in [(Target::ModelOpt, 2), (Target::Gguf, 3), (Target::ComfyUi, 3)] {
        let case = Case::new(target);
        let (expected, mut crashes) = (case.whole(ScaleChoice::Max), 0);
        for operations in 0.. {
            let mut crashed = false;
            for part in (0..parts).rev() {
                crashed |= case.part(&Disk::stops_after(operations), part, parts).is_err();
                case.part(&Disk::default(), part, parts).unwrap();
            }
            let again = case.part(&Disk::default(), 0, parts).unwrap();
            assert_eq!(again.outcome, Outcome::AlreadyThere);
            assert!(!case.target.exists());
            case.finish(&Disk::default(), Existing::Refuse).unwrap();
            assert!(read(&case.target) == expected, "{target}: after {operations} operations");
            let name = case.target.file_name().unwrap().to_str().unwrap();
            assert_eq!(case.names(), [name], "after {operations} operations");
            remove(&case.target);
            crashes += usize::from(crashed);
            if !crashed {
                break;
            }
        }
        assert!(crashes > 15, "{crashes}");
    }
}

/// The same files in another folder, with the times of their last changes.
fn link_all(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(|entry| entry.unwrap()) {
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if from.is_dir() { link_all(&from, &to) } else { std::fs::hard_link(from, to).unwrap() }
    }
}

/// A finish that is stopped can be repeated, also where it had moved some files, or all.
#[test]
fn a_finish_that_is_switched_off_at_any_write_can_be_repeated() {
    for (target, parts, existing) in [
        (Target::ModelOpt, 2, Existing::Refuse),
        (Target::ModelOpt, 5, Existing::Refuse),
        (Target::ModelOpt, 2, Existing::Replace),
        (Target::Gguf, 3, Existing::Refuse),
        (Target::ComfyUi, 3, Existing::Refuse),
    ] {
        let case = Case::new(target);
        let (expected, old) = (case.whole(ScaleChoice::Max), case.whole(ScaleChoice::Mse));
        let mut crashes = 0;
        if existing == Existing::Replace {
            let settings = Settings { scale: ScaleChoice::Mse, ..case.settings.clone() };
            convert(&case.dir.join("in"), &case.target, &settings, &(), &AtomicBool::new(false)).unwrap();
        }
        for part in Portion::all(parts) {
            case.task(&Disk::default(), existing, |task| part_on(task, part)).unwrap();
        }
        // What there is before each finish.
        let begun: Vec<String> = case.names();
        let (work, kept) = (case.target.parent().unwrap(), Folder::new());
        begun.iter().for_each(|name| std::fs::rename(work.join(name), kept.join(name)).unwrap());
        for operations in 0.. {
            begun.iter().for_each(|name| link_all(&kept.join(name), &work.join(name)));
            let first = case.finish(&Disk::stops_after(operations), existing);
            let name = case.target.file_name().unwrap().to_str().unwrap();
            let mut tries = 0;
            while case.names() != [name] || read(&case.target) != expected {
                if case.target.exists() && existing == Existing::Replace {
                    let mut there = read(&case.target);
                    there.retain(|name, _| !name.starts_with(".nvfp4-"));
                    assert!(there == old || there == expected, "a name means whole: {operations}");
                }
                match case.finish(&Disk::default(), existing) {
                    Ok(_) => {}
                    // The result has its name already, or the first attempt had not noted anything.
                    Err(Error::TargetExists { .. }) => {}
                    Err(error) => panic!("{target} after {operations} operations: {error}"),
                }
                tries += 1;
                assert!(tries < 3, "{target} after {operations} operations: {:?}", case.names());
            }
            remove(&case.target);
            if first.is_ok() {
                break;
            }
            crashes += 1;
        }
        assert!(crashes > 15, "{crashes}");
    }
}

/// Numbers by position, for an order and for moments that nobody chose.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }

    fn shuffled(&mut self, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        (1..n).rev().for_each(|i| order.swap(i, self.below(i + 1)));
        order
    }
}

/// 4 GB in BF16: ten layers of a Llama of 7 billion parameters, a file each.
fn four_gigabytes(path: &Path) {
    const SHAPES: [(&str, [usize; 2]); 7] = [
        ("self_attn.q_proj", [4096, 4096]),
        ("self_attn.k_proj", [4096, 4096]),
        ("self_attn.v_proj", [4096, 4096]),
        ("self_attn.o_proj", [4096, 4096]),
        ("mlp.gate_proj", [11008, 4096]),
        ("mlp.up_proj", [11008, 4096]),
        ("mlp.down_proj", [4096, 11008]),
    ];
    let some = values(1 << 20, 1);
    let layer = |l: usize| -> Tensors {
        let weight = |(i, (name, shape)): (usize, &(&str, [usize; 2]))| {
            let (factor, turn) = (1.0 + (7 * l + i) as f32 / 64.0, 4099 * (7 * l + i));
            let values: Vec<f32> =
                some.iter().cycle().skip(turn).take(shape.iter().product()).map(|x| factor * x).collect();
            (format!("model.layers.{l}.{name}.weight"), tensor(Dtype::BF16, shape, &values))
        };
        SHAPES.iter().enumerate().map(weight).collect()
    };
    let mut config = llama_config();
    config["num_hidden_layers"] = 10.into();
    folder(path, &[Tensors::new()], &config);
    std::fs::remove_file(path.join("model.safetensors")).unwrap();
    let mut map = serde_json::Map::new();
    for l in 0..10 {
        let (file, tensors) = (format!("model-{:05}-of-00010.safetensors", l + 1), layer(l));
        super::crash::generated::save(&path.join(&file), &tensors);
        map.extend(tensors.into_keys().map(|name| (name, file.clone().into())));
    }
    let index = serde_json::json!({ "metadata": { "total_size": 0 }, "weight_map": map });
    std::fs::write(path.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// 8 parts in random order, each switched off once at a random write, two made twice: in whole
/// files, and in one file.
#[test]
#[ignore = "writes 8 GB"]
fn eight_parts_of_four_gigabytes_have_the_bytes_of_one_process() {
    const PARTS: usize = 8;
    let dir = Folder::new();
    let (source, stop) = (dir.join("in"), AtomicBool::new(false));
    four_gigabytes(&source);
    let whole = Settings { shards: Shards::AtMost(125_000_000), ..Settings::default() };
    for (name, shards) in [("files", whole.shards), ("one", Settings::default().shards)] {
        let settings = Settings { shards, ..whole.clone() };
        let (alone, target) = (dir.join("alone"), dir.join(name));
        let start = Instant::now();
        convert(&source, &alone, &settings, &(), &stop).unwrap();
        println!("{name}: one process: {:.1} s", start.elapsed().as_secs_f64());
        let checkpoint = Checkpoint::open(&source).unwrap();
        let model = Model::new(&checkpoint).unwrap();
        let plan = Plan::new(&model, &settings.selection, settings.target).unwrap();
        for share in shares(&model, &plan, &settings, PARTS).unwrap() {
            println!("{name}: {share:?}");
        }
        let mut random = Random(20);
        let task = |disk: &Disk, index: usize| {
            let part = Portion::new(index, PARTS).unwrap();
            let settings = &settings;
            part_on(&Task { disk, source: &source, target: &target, settings, observer: &(), stop: &stop }, part)
        };
        let start = Instant::now();
        for part in random.shuffled(PARTS) {
            let killed = task(&Disk::stops_after(random.below(100)), part);
            assert!(killed.is_err(), "part {part} has more writes than that");
        }
        let order = random.shuffled(PARTS);
        for &part in &order[1..] {
            task(&Disk::default(), part).unwrap();
        }
        let end = || {
            let disk = Disk::default();
            let task =
                Task { disk: &disk, source: &source, target: &target, settings: &settings, observer: &(), stop: &stop };
            finish_on(&task)
        };
        match end() {
            Err(Error::MissingParts { missing, .. }) => {
                assert_eq!(missing, [Portion::new(order[0], PARTS).unwrap()]);
            }
            other => panic!("{other:?}"),
        }
        for &part in &order[..3] {
            task(&Disk::default(), part).unwrap();
        }
        println!("{name}: parts, each killed once: {:.1} s", start.elapsed().as_secs_f64());
        let start = Instant::now();
        end().unwrap();
        println!("{name}: finish: {:.1} s", start.elapsed().as_secs_f64());
        assert!(contents(&target) == contents(&alone), "{name}");
        std::fs::remove_dir_all(&alone).unwrap();
        std::fs::remove_dir_all(&target).unwrap();
    }
}
