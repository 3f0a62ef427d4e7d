//! Training goes on from a file as if it had never stopped.

use crate::cases::*;
use candle_core::DType;
use candle_nn::{Optimizer, ParamsAdamW};
use nvfp4_nn::{AdamW, Session};
use nvfp4_recipe::Recipe;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A folder's path that is not there yet; what is there later goes with its owner.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        Folder(std::env::temp_dir().join(format!("nvfp4-training-{}-{n}", std::process::id())))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

struct Run {
    case: Case,
    optimizer: AdamW,
}

impl Run {
    fn new(kind: &str, recipe: &Recipe, seed: u64) -> Self {
        let case = Case::with(kind, recipe, seed);
        let config = ParamsAdamW { lr: 0.01, ..Default::default() };
        let optimizer = AdamW::new(case.session.parameters(), config).unwrap();
        Run { case, optimizer }
    }

    fn steps(&mut self, count: usize) -> Vec<Outcome> {
        let step = |_| {
            let outcome = self.case.run();
            self.optimizer.step(&self.case.session.gradients().unwrap()).unwrap();
            self.case.session.next_step().unwrap();
            outcome
        };
        (0..count).map(step).collect()
    }

    fn session(&self) -> &Session {
        &self.case.session
    }

    fn parameters(&self) -> BTreeMap<String, Vec<u64>> {
        self.session().parameters().iter().map(|(name, var)| (name.clone(), bits(var))).collect()
    }
}

/// test_checkpoint_resume_training and its like: parameters, moments, random numbers and delayed scales, all of them.
#[test]
fn resuming_is_never_having_stopped() {
    let stochastic = operands("nvfp4(stochastic)", "nvfp4(stochastic)", "nvfp4(stochastic)");
    for recipe in [recipe("nvfp4"), recipe("delayed_scaling+attention"), recipe("nvfp4_linear_fp8_dpa"), stochastic] {
        for kind in ["gpt layer", "grouped linear"] {
            let folder = Folder::new();
            let mut whole = Run::new(kind, &recipe, 4);
            whole.steps(2);
            let notes = BTreeMap::from([("text".to_string(), "position 17".to_string())]);
            whole.session().save(&folder.0, &whole.optimizer, &notes).unwrap();
            let expected = whole.steps(2);

            // A run of another seed takes over everything.
            let mut resumed = Run::new(kind, &recipe, 99);
            assert_eq!(resumed.case.session.load(&folder.0, &mut resumed.optimizer).unwrap(), notes);
            assert_eq!(resumed.session().step(), 2);
            assert!(resumed.steps(2) == expected, "{kind}, {recipe:?}");
            assert!(resumed.parameters() == whole.parameters());
            // A later checkpoint takes the place of an earlier one.
            resumed.session().save(&folder.0, &resumed.optimizer, &notes).unwrap();
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let folder = Folder::new();
    let mut run = Run::new("linear", &recipe("nvfp4"), 4);
    run.steps(1);
    run.session().save(&folder.0, &run.optimizer, &BTreeMap::new()).unwrap();
    let refused = |kind: &str, preset: &str, folder: &std::path::Path| {
        let mut other = Run::new(kind, &recipe(preset), 5);
        let before = other.parameters();
        let message = other.case.session.load(folder, &mut other.optimizer).unwrap_err().to_string();
        assert!(other.parameters() == before && other.session().step() == 0, "{message}");
        message
    };
    let message = refused("linear", "mxfp8", &folder.0);
    assert!(message.contains("written with recipe 'nvfp4'") && message.contains("applied is 'mxfp8'"), "{message}");
    let message = refused("linear without bias", "nvfp4", &folder.0);
    assert!(message.contains("is not of this model"), "{message}");
    let message = refused("layer norm linear", "nvfp4", &folder.0);
    assert!(message.contains("is missing: the file is of another model"), "{message}");
    assert!(refused("linear", "nvfp4", &folder.0.join("nowhere")).contains("training.safetensors"));

    let file = folder.0.join("training.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() - 7]).unwrap();
    refused("linear", "nvfp4", &folder.0);
    // A version that does not exist yet, of the same length.
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(4096)]).to_string();
    let at = text.find("\"version\":\"1\"").unwrap() + "\"version\":\"".len();
    let mut newer = bytes.clone();
    newer[at] = b'7';
    std::fs::write(&file, &newer).unwrap();
    let message = refused("linear", "nvfp4", &folder.0);
    assert!(message.contains("expected version '1', got '7'; read it with the program that wrote it"), "{message}");
    std::fs::write(&file, &bytes).unwrap();
    let mut fits = Run::new("linear", &recipe("nvfp4"), 5);
    fits.case.session.load(&folder.0, &mut fits.optimizer).unwrap();
}

/// A pipe would block whoever opens it.
#[cfg(unix)]
#[test]
fn a_pipe_is_refused_without_waiting() {
    let folder = Folder::new();
    std::fs::create_dir_all(&folder.0).unwrap();
    let pipe = folder.0.join("training.safetensors");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut run = Run::new("linear", &recipe("nvfp4"), 4);
    let session = run.case.session.clone();
    for refused in [
        session.load(&folder.0, &mut run.optimizer).map(drop),
        Session::notes(&folder.0).map(drop),
        session.load_parameters(&pipe),
    ] {
        let message = refused.unwrap_err().to_string();
        assert!(message.contains("a pipe, socket or device, where a file is expected"), "{message}");
    }
}

/// A model in another type of parameters.
#[test]
fn another_type_is_refused() {
    let folder = Folder::new();
    let run = Run::new("linear", &recipe("high_precision"), 4);
    run.session().save(&folder.0, &run.optimizer, &BTreeMap::new()).unwrap();
    let wide = Case::new("linear", DType::F64, 4);
    wide.session.apply(&recipe("high_precision")).unwrap();
    let mut optimizer = AdamW::new(wide.session.parameters(), Default::default()).unwrap();
    let message = wide.session.load(&folder.0, &mut optimizer).unwrap_err().to_string();
    assert!(message.contains("expected F64") && message.contains("got F32"), "{message}");
}

#[test]
fn a_step_under_way_is_not_saved() {
    let folder = Folder::new();
    let run = Run::new("linear", &recipe("nvfp4"), 4);
    run.case.run();
    let message = run.session().save(&folder.0, &run.optimizer, &BTreeMap::new()).unwrap_err().to_string();
    assert!(message.contains("a step is under way: save after `Session::next_step`"), "{message}");
    assert!(!folder.0.exists());
}

/// test_load_bf16_state_dict_into_hybrid_model, test_load_bf16_state_dict_into_identity_model_exact: parameters go from any recipe to any.
#[test]
fn parameters_alone_go_from_recipe_to_recipe() {
    let folder = Folder::new();
    let mut plain = Run::new("gpt layer", &recipe("high_precision"), 4);
    plain.steps(2);
    plain.session().save(&folder.0, &plain.optimizer, &BTreeMap::new()).unwrap();
    let file = folder.0.join("training.safetensors");
    for preset in ["nvfp4", "delayed_scaling", "high_precision"] {
        let other = Run::new("gpt layer", &recipe(preset), 5);
        other.case.run();
        other.session().drop_gradients().unwrap();
        other.session().load_parameters(&file).unwrap();
        assert!(other.parameters() == plain.parameters(), "{preset}");
        // Codes follow at once.
        let fresh = Run::new("gpt layer", &recipe(preset), 5);
        fresh.session().load_parameters(&file).unwrap();
        assert!(bits(&fresh.case.loss().0) == bits(&other.case.loss().0), "{preset}");
    }
    let message = Run::new("linear", &recipe("nvfp4"), 5).session().load_parameters(&file).unwrap_err().to_string();
    assert!(message.contains("is missing"), "{message}");
}

/// A process that dies while it replaces a checkpoint leaves the old one beside its place, which is found there, or one too many, which goes.
/// What is not a checkpoint stays, whatever it is called.
#[test]
fn a_replacement_that_was_interrupted() {
    let (folder, recipe) = (Folder::new(), recipe("nvfp4"));
    let beside = |ending: &str| nvfp4_files::durable::beside(&folder.0, ending);
    let (old, kept) = (beside(".replaced-2"), beside(".replaced-1"));
    std::fs::create_dir(&kept).unwrap();
    std::fs::write(kept.join("mine"), "").unwrap();
    let mut run = Run::new("linear", &recipe, 1);
    assert!(!Session::is_saved(&folder.0).unwrap());
    run.session().save(&folder.0, &run.optimizer, &BTreeMap::new()).unwrap();
    let saved = run.parameters();
    std::fs::rename(&folder.0, &old).unwrap();
    run.steps(1);
    run.case.session.load(&folder.0, &mut run.optimizer).unwrap();
    assert!(run.parameters() == saved && !old.exists());

    std::fs::create_dir(&old).unwrap();
    std::fs::write(old.join("training.safetensors"), "older").unwrap();
    run.session().save(&folder.0, &run.optimizer, &BTreeMap::new()).unwrap();
    assert!(Session::is_saved(&folder.0).unwrap() && !old.exists());
    assert!(kept.join("mine").exists());
    std::fs::remove_dir_all(&kept).unwrap();
}

/// A folder with anything else in it is neither replaced nor taken for a checkpoint; nor is the place where one is written.
#[test]
fn what_is_no_checkpoint_is_not_replaced() {
    let folder = Folder::new();
    let run = Run::new("linear", &recipe("nvfp4"), 1);
    let partial = nvfp4_files::durable::beside(&folder.0, ".partial");
    for place in [&folder.0, &partial] {
        std::fs::create_dir_all(place).unwrap();
        std::fs::write(place.join("thesis.txt"), "").unwrap();
        let refused = run.session().save(&folder.0, &run.optimizer, &BTreeMap::new()).unwrap_err().to_string();
        assert!(refused.contains("holds 'thesis.txt', which is no part of a checkpoint"), "{refused}");
        assert!(place.join("thesis.txt").exists());
        std::fs::remove_dir_all(place).unwrap();
    }
    assert!(!Session::is_saved(&folder.0).unwrap());
    run.session().save(&folder.0, &run.optimizer, &BTreeMap::new()).unwrap();
    assert!(Session::is_saved(&folder.0).unwrap());
}
