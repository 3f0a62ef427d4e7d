//! The state of delayed scaling.

use crate::tools::*;
use nvfp4::Side;
use nvfp4_files::Error as File;
use nvfp4_recipe::*;
use std::cell::RefCell;
use std::path::PathBuf;

const INPUT: LinearSlot = LinearSlot::Input;
const WEIGHT: LinearSlot = LinearSlot::Weight;
const GRAD: LinearSlot = LinearSlot::GradOutput;

fn fc() -> Model {
    model([Module::linear("fc")])
}

fn site(slot: LinearSlot) -> Site {
    Site::new("fc", slot)
}

fn delayed() -> Recipe {
    linear("fp8-delayed(e4m3, history=16)", "fp8-delayed(e4m3, history=16)", "fp8-delayed(e5m2, history=16)")
}

#[test]
fn delayed_scaling_request_wiring() {
    let states = States::new(&plan(&fc(), &delayed())).unwrap();
    assert_eq!(states.len(), 3);
    for slot in [INPUT, WEIGHT, GRAD] {
        let state = states.get(&site(slot), Side::Row).unwrap();
        assert_eq!((state.scale(), state.history()), (1.0, &[0.0; 16][..]));
        assert_eq!(states.get(&site(slot), Side::Column), Some(state), "one scale for both directions");
    }
}

/// factories_return_distinct_instances_and_buffers: what one tensor records, no other sees.
#[test]
fn factories_return_distinct_instances_and_buffers() {
    let mut states = States::new(&plan(&fc(), &delayed())).unwrap();
    states.record(&site(INPUT), Side::Row, 3.0).unwrap();
    let amax = |slot| states.get(&site(slot), Side::Row).unwrap().history()[0];
    assert_eq!([INPUT, WEIGHT, GRAD].map(amax), [3.0, 0.0, 0.0]);
}

#[test]
fn custom_recipe_mixed_ds_and_stateless() {
    let mixed = linear("fp8-delayed(e4m3)", "fp8(e4m3)", "fp8(e5m2)");
    let mut states = States::new(&plan(&fc(), &mixed)).unwrap();
    assert_eq!(states.len(), 1, "only what asks for state has some");
    step(&mut states, &[(INPUT, 7.0)]);
    assert_eq!(states.scales().get(&site(INPUT), Side::Row), Some(64.0));
    assert_eq!(states.scales().get(&site(WEIGHT), Side::Row), None);
    let error = states.record(&site(WEIGHT), Side::Row, 1.0).unwrap_err().to_string();
    assert_eq!(error, "fc:weight: its row direction has no delayed scaling");
}

fn step(states: &mut States, amaxes: &[(LinearSlot, f32)]) {
    for (slot, amax) in amaxes {
        states.record(&site(*slot), Side::Row, *amax).unwrap();
    }
    for pass in [Pass::Forward, Pass::Backward] {
        states.update(pass, &SingleProcess).unwrap();
    }
}

#[test]
fn custom_recipe_ds_multi_step() {
    let short = linear("fp8-delayed(e4m3, history=3)", "fp8-delayed(e4m3, history=3, most-recent)", "fp8(e5m2)");
    let mut states = States::new(&plan(&fc(), &short)).unwrap();
    let mut scales = Vec::new();
    for amax in [8.0, 2.0, 4.0, 1.0, 0.0, 1.0] {
        step(&mut states, &[(INPUT, amax), (WEIGHT, amax)]);
        let scales_ = states.scales();
        scales.push([INPUT, WEIGHT].map(|slot| 448.0 / scales_.get(&site(slot), Side::Row).unwrap()));
    }
    // The maximum of three steps, and the last step; a step without a tensor changes nothing.
    assert_eq!(scales, [[8.0, 8.0], [8.0, 2.0], [8.0, 4.0], [4.0, 1.0], [4.0, 1.0], [4.0, 1.0]]);
    assert_eq!(states.get(&site(INPUT), Side::Row).unwrap().history(), [0.0, 1.0, 1.0]);
}

#[test]
fn several_tensors_of_a_step_count_as_one() {
    let mut states = States::new(&plan(&fc(), &delayed())).unwrap();
    for amax in [2.0, 7.0, f32::NAN, 3.0] {
        states.record(&site(INPUT), Side::Column, amax).unwrap();
    }
    assert_eq!(states.get(&site(INPUT), Side::Row).unwrap().history()[0], 7.0);
    let error = states.record(&site(INPUT), Side::Row, -1.0).unwrap_err().to_string();
    assert!(error.contains("expected a magnitude, got -1"), "{error}");
}

/// rejects_same_sub_quantizer_instance_for_both_directions: two directions of one format never share what they remember.
#[test]
fn a_split_spec_has_a_scale_per_direction() {
    let split = linear("fp8-delayed(e4m3) / fp8-delayed(e4m3)", "fp8", "fp8");
    let mut states = States::new(&plan(&fc(), &split)).unwrap();
    assert_eq!(states.len(), 2);
    states.record(&site(INPUT), Side::Column, 7.0).unwrap();
    states.update(Pass::Forward, &SingleProcess).unwrap();
    let scales = states.scales();
    assert_eq!([Side::Row, Side::Column].map(|side| scales.get(&site(INPUT), side)), [Some(1.0), Some(64.0)]);
}

#[test]
fn passes_are_updated_apart() {
    let mut states = States::new(&plan(&fc(), &delayed())).unwrap();
    states.record(&site(INPUT), Side::Row, 7.0).unwrap();
    states.record(&site(GRAD), Side::Row, 7.0).unwrap();
    states.update(Pass::Forward, &SingleProcess).unwrap();
    let scale = |states: &States, slot| states.scales().get(&site(slot), Side::Row).unwrap();
    assert_eq!([scale(&states, INPUT), scale(&states, GRAD)], [64.0, 1.0]);
    states.update(Pass::Backward, &SingleProcess).unwrap();
    assert_eq!(scale(&states, GRAD), 8192.0);
}

/// activation_recompute and prepare_restore_roundtrip_is_identity: the second forward pass has the scales of the first.
#[test]
fn recompute_replays_with_the_same_scales() {
    let mut states = States::new(&plan(&fc(), &delayed())).unwrap();
    step(&mut states, &[(INPUT, 7.0)]);
    let first = states.scales();
    states.record(&site(INPUT), Side::Row, 14.0).unwrap();
    let before = states.clone();
    states.update(Pass::Forward, &SingleProcess).unwrap();
    assert_ne!(states.scales(), first, "the next step's scales");
    assert_eq!(before.scales(), first, "recording does not move a scale");
    assert_eq!(first.get(&site(INPUT), Side::Row), Some(64.0), "the first pass's scales are still there");
}

/// Workers in which another one saw larger values.
struct Others {
    factor: f32,
    calls: RefCell<Vec<(Group, usize)>>,
}

impl Collective for Others {
    fn max(&self, group: &Group, amaxes: &mut [f32]) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        self.calls.borrow_mut().push((group.clone(), amaxes.len()));
        amaxes.iter_mut().for_each(|amax| *amax = (*amax).max(self.factor));
        Ok(())
    }
}

struct Broken;

impl Collective for Broken {
    fn max(&self, _: &Group, _: &mut [f32]) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Err("a worker is gone".into())
    }
}

#[test]
fn workers_agree_on_amaxes() {
    let recipe = linear("fp8-delayed(e4m3)", "fp8-delayed(e4m3, local)", "fp8(e5m2)");
    let mut states = States::new(&plan(&fc(), &recipe)).unwrap();
    states.record(&site(INPUT), Side::Row, 2.0).unwrap();
    states.record(&site(WEIGHT), Side::Row, 2.0).unwrap();
    let workers = Others { factor: 7.0, calls: RefCell::default() };
    states.update(Pass::Forward, &workers).unwrap();
    let scales = states.scales();
    assert_eq!([INPUT, WEIGHT].map(|slot| scales.get(&site(slot), Side::Row)), [Some(64.0), Some(224.0)]);
    assert_eq!(workers.calls.borrow().len(), 1, "local amaxes are not sent");
}

/// A worker that saw no tensor takes part all the same; otherwise the others would wait for it.
#[test]
fn a_worker_without_tensors_takes_part() {
    let mut states = States::new(&plan(&fc(), &recipe("delayed_scaling"))).unwrap();
    let workers = Others { factor: 7.0, calls: RefCell::default() };
    states.update(Pass::Forward, &workers).unwrap();
    let calls = workers.calls.borrow();
    assert_eq!(calls.len(), 1);
    assert_eq!((calls[0].0.pass, calls[0].1), (Pass::Forward, 2), "input and weight in one call");
    assert_eq!(states.scales().get(&site(INPUT), Side::Row), Some(64.0));
}

#[test]
fn a_failed_reduction_changes_nothing() {
    let mut states = States::new(&plan(&fc(), &delayed())).unwrap();
    states.record(&site(INPUT), Side::Row, 2.0).unwrap();
    let before = states.get(&site(INPUT), Side::Row).cloned();
    let error = states.update(Pass::Forward, &Broken).unwrap_err();
    assert_eq!(error.to_string(), "the reduction among workers failed: a worker is gone");
    assert_eq!(states.get(&site(INPUT), Side::Row).cloned(), before);
}

#[test]
fn users_amax_rules_have_names() {
    fn mean(window: &[f32]) -> f32 {
        window.iter().sum::<f32>() / window.len() as f32
    }
    let plan = plan(&fc(), &linear("fp8-delayed(e4m3, history=2, amax=mean)", "fp8", "fp8"));
    let error = States::new(&plan).unwrap_err().to_string();
    assert_eq!(error, "the amax rule 'mean' is not known: pass it with `AmaxRules::with`");
    let mut states = States::with_rules(&plan, AmaxRules::default().with("mean".parse().unwrap(), mean)).unwrap();
    step(&mut states, &[(INPUT, 4.0)]);
    assert_eq!(states.scales().get(&site(INPUT), Side::Row), Some(224.0), "the mean of 4 and 0");
}

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("recipe-state-{name}.safetensors"))
}

fn load(path: &std::path::Path, plan: &Plan) -> Result<States> {
    States::load(path, plan, AmaxRules::default())
}

/// state_dict_save_load_roundtrip and checkpoint_resume_training: training goes on as if it had not stopped.
#[test]
fn checkpoint_resume_training() {
    let plan =
        plan(&fc(), &linear("fp8-delayed(e4m3) / fp8-delayed(e4m3, margin=1)", "fp8-delayed(e4m3)", "fp8(e5m2)"));
    let mut states = States::new(&plan).unwrap();
    for amax in [3.0, f32::INFINITY, 5.0] {
        states.record(&site(INPUT), Side::Column, amax).unwrap();
        step(&mut states, &[(INPUT, amax), (WEIGHT, 0.1)]);
    }
    states.record(&site(INPUT), Side::Row, 0.7).unwrap();
    let path = file("resume");
    states.save(&path).unwrap();
    let mut resumed = load(&path, &plan).unwrap();
    for states in [&mut states, &mut resumed] {
        step(states, &[(INPUT, 2.0), (WEIGHT, 9.0)]);
    }
    assert_eq!(resumed.scales(), states.scales());
    for (slot, side) in [(INPUT, Side::Row), (INPUT, Side::Column), (WEIGHT, Side::Row)] {
        assert_eq!(resumed.get(&site(slot), side), states.get(&site(slot), side));
    }
}

/// stateless_pickled_extra_state_is_ignored, stateless_custom_pickled_extra_state_is_ignored: a plan without state writes an empty file and reads it back.
#[test]
fn a_plan_without_state_saves_none() {
    let (plan_, path) = (plan(&fc(), &recipe("nvfp4")), file("stateless"));
    States::new(&plan_).unwrap().save(&path).unwrap();
    assert!(load(&path, &plan_).unwrap().is_empty());
    let error = load(&path, &plan(&fc(), &delayed())).unwrap_err().to_string();
    assert!(error.contains("the file has no such state"), "{error}");
}

/// Every recipe, stateful or not, saves and loads what it has.
#[test]
fn checkpoint_extra_state_policy_classifier_map_covers_all_recipes() {
    for name in Preset::names() {
        let (plan, path) = (plan(&zoo(), &recipe(name)), file(name));
        let states = States::new(&plan).unwrap();
        let stateful = matches!(name, "delayed_scaling" | "nvfp4_linear_fp8_dpa");
        assert_eq!(states.is_empty(), !stateful, "{name}");
        states.save(&path).unwrap();
        assert_eq!(load(&path, &plan).unwrap().scales(), states.scales());
    }
}

/// Files of other programs, also global_free_pickled_extra_state_is_ignored: well-formed, but no state of ours.
#[test]
fn foreign_files_are_errors() {
    let (plan_, path) = (plan(&fc(), &delayed()), file("foreign"));
    let header = r#"{"weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.extend([0; 4]);
    std::fs::write(&path, bytes).unwrap();
    let error = load(&path, &plan_).unwrap_err().to_string();
    assert!(error.ends_with("expected the format 'nvfp4-recipe-state', got 'none'"), "{error}");
    std::fs::write(&path, [0xff; 64]).unwrap();
    assert!(matches!(load(&path, &plan_), Err(Error::File(File::Safetensors { .. }))), "a header of 2⁶⁴ bytes");
}

/// stateful_unknown_or_malformed_pickled_extra_state_requires_opt_in: here such a file is an error, and nothing is executed.
#[test]
fn malformed_files_are_errors() {
    let (plan_, path) = (plan(&fc(), &delayed()), file("malformed"));
    let mut states = States::new(&plan_).unwrap();
    step(&mut states, &[(INPUT, 3.0)]);
    states.save(&path).unwrap();
    let good = std::fs::read(&path).unwrap();
    for end in (0..good.len()).step_by(13) {
        std::fs::write(&path, &good[..end]).unwrap();
        assert!(matches!(load(&path, &plan_), Err(Error::File(File::Safetensors { .. }))), "cut at {end}");
    }
    std::fs::write(&path, b"\x80\x04\x95pickle").unwrap();
    assert!(matches!(load(&path, &plan_), Err(Error::File(File::Safetensors { .. }))));
    assert!(matches!(load(&file("absent"), &plan_), Err(Error::File(File::Io { .. }))));

    let header: usize = u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let text = String::from_utf8(good[8..8 + header].to_vec()).unwrap();
    for (from, to, message) in [
        (
            "nvfp4-recipe-state",
            "nvfp4-recipe-stale",
            "expected the format 'nvfp4-recipe-state', got 'nvfp4-recipe-stale'",
        ),
        (r#""version":"1""#, r#""version":"2""#, "expected format version 1, got 2"),
        ("fc:input", "fc:inpux", "fc:inpux (both): the plan has no such state, or it stands twice"),
        ("fc:input", "fc:weight", "fc:weight (both): the plan has no such state, or it stands twice"),
        ("history=16", "history=17", "fc:input (both): the file has fp8-delayed(e4m3, history=17), the plan"),
        ("fp8-delayed(", "fp9-delayed(", "unknown format 'fp9-delayed'"),
        ("0.history", "0.hist0ry", "tensor '0.history' is missing"),
        (r#""shape":[16]"#, r#""shape":[4,4]"#, "expected the shape [16], got [4, 4]"),
        (r#""dtype":"F32""#, r#""dtype":"I32""#, "expected F32, got I32"),
        ("directions", "directionz", "metadata 'entries'"),
    ] {
        assert!(text.contains(from), "{from} in {text}");
        // Padding keeps the header's length, which may only grow by spaces.
        let mut changed = text.replacen(from, to, 1).into_bytes();
        while !changed.len().is_multiple_of(8) {
            changed.push(b' ');
        }
        let mut bytes = (changed.len() as u64).to_le_bytes().to_vec();
        bytes.extend(changed);
        bytes.extend(&good[8 + header..]);
        std::fs::write(&path, bytes).unwrap();
        let error = load(&path, &plan_).unwrap_err().to_string();
        assert!(error.contains(message), "{from} → {to}: {error}");
    }
}

#[test]
fn numbers_that_no_state_has_are_errors() {
    let (plan_, path) = (plan(&fc(), &linear("fp8-delayed(e4m3, history=1)", "fp8", "fp8")), file("numbers"));
    States::new(&plan_).unwrap().save(&path).unwrap();
    let good = std::fs::read(&path).unwrap();
    let scale = 1f32.to_le_bytes();
    let at = good.windows(4).rposition(|bytes| bytes == scale).unwrap();
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let mut bytes = good.clone();
        bytes[at..at + 4].copy_from_slice(&f32::to_le_bytes(bad));
        std::fs::write(&path, bytes).unwrap();
        let error = load(&path, &plan_).unwrap_err().to_string();
        assert!(error.contains("fc:input: expected a scale above 0"), "{error}");
    }
    let history = if at + 4 == good.len() { at - 4 } else { at + 4 };
    let mut bytes = good.clone();
    bytes[history..history + 4].copy_from_slice(&(-2f32).to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let error = load(&path, &plan_).unwrap_err().to_string();
    assert!(error.contains("expected amaxes of at least 0, got -2"), "{error}");
}
