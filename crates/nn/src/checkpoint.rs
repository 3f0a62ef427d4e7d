//! Training state in files: a folder with everything that the next step depends on.
//!
//! `training.safetensors` holds `parameter.NAME`, `first.NAME` and `second.NAME` (the optimizer's
//! moments); its metadata has `format = nvfp4-training`, `version = 1`, the step, the optimizer's
//! step, the generator's state, the recipe with the plan's fingerprint, and the caller's notes
//! under `note.KEY`. `states.safetensors` is delayed scaling's. Nothing in a file is executed.

use crate::adamw::{AdamW, Moments};
use crate::{Error, Result, Session};
use candle_core::{Device, Tensor, Var};
use nvfp4::Generator;
use nvfp4_files::durable::{self, Disk};
use nvfp4_files::regular;
use nvfp4_recipe::{AmaxRules, States};
use safetensors::SafeTensors;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

const FORMAT: &str = "nvfp4-training";
const VERSION: &str = "1";

/// The files of a checkpoint.
const TRAINING: &str = "training.safetensors";
const STATES: &str = "states.safetensors";

impl Session {
    /// Writes the state between two steps to a folder. The folder of an earlier checkpoint is
    /// replaced once the new one is complete.
    ///
    /// `notes` are the caller's, and come back from [`Session::load`]. If the earlier checkpoint
    /// cannot be removed, since it is another user's, returns where it is.
    pub fn save(&self, folder: &Path, optimizer: &AdamW, notes: &BTreeMap<String, String>) -> Result<Option<PathBuf>> {
        let refuse = |reason: &str| Error::Checkpoint { path: folder.to_path_buf(), reason: reason.to_string() };
        let mut state = self.state();
        state.record_amaxes()?;
        if !state.gradients.is_empty() {
            return Err(refuse("a step is under way: save after `Session::next_step`"));
        }
        let (Some(plan), Some(states)) = (&state.plan, &state.states) else { return Err(Error::NoPlan) };
        let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
        for (name, var) in &state.parameters {
            tensors.insert(format!("parameter.{name}"), var.as_tensor().clone());
        }
        for (name, Moments { first, second, .. }) in &optimizer.moments {
            tensors.insert(format!("first.{name}"), first.as_tensor().clone());
            tensors.insert(format!("second.{name}"), second.as_tensor().clone());
        }
        let generator = state.generator.state().map(|word| word.to_string()).join(" ");
        let own = [
            ("format", FORMAT.to_string()),
            ("version", VERSION.to_string()),
            ("step", state.step.to_string()),
            ("seed", state.seed.to_string()),
            ("optimizer_step", optimizer.step.to_string()),
            ("generator", generator),
            ("recipe", plan.recipe().to_string()),
            ("plan", format!("{:016x}", plan.fingerprint())),
        ];
        let own = own.into_iter().map(|(key, value)| (key.to_string(), value));
        let notes = notes.iter().map(|(key, value)| (format!("note.{key}"), value.clone()));
        let metadata: HashMap<String, String> = own.chain(notes).collect();

        put_back(folder)?;
        let (disk, partial) = (Disk::default(), durable::beside(folder, ".partial"));
        check_ours(&partial)?;
        if partial.exists() {
            disk.remove_folder(&partial)?;
        }
        disk.create_folder(&partial)?;
        let file = partial.join(TRAINING);
        durable::write_with(&file, |part| {
            safetensors::serialize_to_file(&tensors, Some(metadata), part)
                .map_err(|error| Error::Checkpoint { path: file.clone(), reason: error.to_string() })
        })?;
        states.save(&partial.join(STATES))?;
        // The old one stays until the new one stands in its place.
        let old = durable::aside(folder);
        disk.exchange(&partial, folder, &old)?;
        Ok(Some(old).filter(|old| old.symlink_metadata().is_ok() && disk.remove_folder(old).is_err()))
    }

    /// Whether a folder has a checkpoint; an error where it has anything else, which a checkpoint
    /// would replace. One whose replacement was interrupted is put back in its place.
    pub fn is_saved(folder: &Path) -> Result<bool> {
        put_back(folder)?;
        Ok(folder.join(TRAINING).exists())
    }

    /// Continues from a checkpoint. The modules and the applied recipe must be those that it was
    /// written with. Everything is checked before anything is changed. Returns the notes.
    pub fn load(&self, folder: &Path, optimizer: &mut AdamW) -> Result<BTreeMap<String, String>> {
        put_back(folder)?;
        let path = folder.join(TRAINING);
        let refuse = |reason: String| Error::Checkpoint { path: path.clone(), reason };
        let plan = self.plan().ok_or(Error::NoPlan)?;
        let (bytes, metadata) = read(&path)?;
        let value = |key: &str| metadata.get(key).map_or("none", String::as_str);
        let number = |key: &str| {
            let parsed = value(key).parse::<u64>();
            parsed.map_err(|_| refuse(format!("metadata '{key}': expected a number, got '{}'", value(key))))
        };
        let fingerprint = format!("{:016x}", plan.fingerprint());
        if value("plan") != fingerprint {
            let (was, is) = (value("recipe"), plan.recipe());
            let why =
                format!("written with recipe '{was}' (plan {}), applied is '{is}' (plan {fingerprint})", value("plan"));
            return Err(refuse(format!("{why}; apply the recipe that it was written with, load, then change it")));
        }
        let words: Vec<u64> = value("generator").split(' ').filter_map(|word| word.parse().ok()).collect();
        let words: [u64; 4] =
            words.try_into().map_err(|_| refuse("metadata 'generator': expected 4 numbers".into()))?;
        let generator = Generator::from_state(words)?;
        let (step, seed, optimizer_step) = (number("step")?, number("seed")?, number("optimizer_step")?);
        let tensors = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu)?;
        let mut changes = Changes { path: &path, tensors, sets: Vec::new() };
        for (name, var) in self.parameters() {
            changes.plan(format!("parameter.{name}"), &var)?;
        }
        for (name, Moments { first, second, .. }) in &optimizer.moments {
            changes.plan(format!("first.{name}"), first)?;
            changes.plan(format!("second.{name}"), second)?;
        }
        let states = States::load(&folder.join(STATES), &plan, AmaxRules::default())?;
        changes.apply()?;
        optimizer.step = optimizer_step as usize;
        self.resume(step, seed, generator, states)?;
        Ok(notes(&metadata))
    }

    /// The notes of a checkpoint of any modules and any recipe: a caller may keep there how to make
    /// them.
    pub fn notes(folder: &Path) -> Result<BTreeMap<String, String>> {
        put_back(folder)?;
        let (_, metadata) = read(&folder.join(TRAINING))?;
        Ok(notes(&metadata))
    }
}

impl Session {
    /// Loads the parameters alone, from a checkpoint's `training.safetensors` or from any
    /// safetensors file that has them by name. The recipe, the optimizer and the seed may differ.
    /// Everything is checked before anything is changed.
    pub fn load_parameters(&self, path: &Path) -> Result<()> {
        let bytes = regular::read(path, u64::MAX)?;
        let tensors = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu)?;
        let named = tensors.into_iter().filter(|(name, _)| !name.starts_with("first.") && !name.starts_with("second."));
        let named =
            named.map(|(name, tensor)| (name.strip_prefix("parameter.").map_or(name.clone(), str::to_string), tensor));
        let mut changes = Changes { path, tensors: named.collect(), sets: Vec::new() };
        for (name, var) in self.parameters() {
            changes.plan(name, &var)?;
        }
        changes.apply()?;
        self.forget_weights()
    }
}

/// Variables and their new values, checked to fit.
struct Changes<'a> {
    path: &'a Path,
    tensors: HashMap<String, Tensor>,
    sets: Vec<(Var, Tensor)>,
}

impl Changes<'_> {
    fn plan(&mut self, name: String, var: &Var) -> Result<()> {
        let refuse = |reason: String| Error::Checkpoint { path: self.path.to_path_buf(), reason };
        let Some(tensor) = self.tensors.remove(&name) else {
            return Err(refuse(format!("'{name}' is missing: the file is of another model or optimizer")));
        };
        if tensor.shape() != var.shape() || tensor.dtype() != var.dtype() {
            let of = |x: &Tensor| format!("{:?} {:?}", x.dtype(), x.dims());
            return Err(refuse(format!("'{name}': expected {}, got {}", of(var), of(&tensor))));
        }
        self.sets.push((var.clone(), tensor));
        Ok(())
    }

    fn apply(self) -> Result<()> {
        if let Some(name) = self.tensors.keys().min() {
            let reason = format!("'{name}' is not of this model: make the modules that the file was written with");
            return Err(Error::Checkpoint { path: self.path.to_path_buf(), reason });
        }
        for (var, tensor) in self.sets {
            var.set(&tensor.to_device(var.device())?)?;
        }
        Ok(())
    }
}

/// A file of this format and version, and its metadata.
fn read(path: &Path) -> Result<(Vec<u8>, HashMap<String, String>)> {
    let refuse = |reason: String| Error::Checkpoint { path: path.to_path_buf(), reason };
    let bytes = regular::read(path, u64::MAX)?;
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|error| refuse(error.to_string()))?;
    let metadata = header.metadata().clone().unwrap_or_default();
    for (key, expected) in [("format", FORMAT), ("version", VERSION)] {
        let found = metadata.get(key).map_or("none", String::as_str);
        if found != expected {
            let fix = "read it with the program that wrote it";
            return Err(refuse(format!("expected {key} '{expected}', got '{found}'; {fix}")));
        }
    }
    Ok((bytes, metadata))
}

fn notes(metadata: &HashMap<String, String>) -> BTreeMap<String, String> {
    let notes = metadata.iter().filter_map(|(key, value)| Some((key.strip_prefix("note.")?, value)));
    notes.map(|(key, value)| (key.to_string(), value.clone())).collect()
}

/// Repairs what a process that died in [`Session::save`] left: a checkpoint beside its place, or
/// one that was replaced already.
fn put_back(folder: &Path) -> Result<()> {
    check_ours(folder)?;
    let disk = Disk::default();
    let mut aside = replaced(folder)?;
    if !folder.exists()
        && let Some(last) = aside.pop()
    {
        disk.rename(&last, folder)?;
        disk.sync_folder(durable::parent(folder))?;
    }
    // What may not be removed stays: it is in nobody's way.
    aside.iter().for_each(|old| drop(disk.remove_folder(old)));
    Ok(())
}

/// The folders that a checkpoint moved to when it was replaced, the last one last. A folder of such
/// a name with anything else in it is not one.
fn replaced(folder: &Path) -> Result<Vec<PathBuf>> {
    let start = format!("{}.replaced-", folder.file_name().unwrap_or_default().to_string_lossy());
    let Ok(names) = std::fs::read_dir(durable::parent(folder)) else { return Ok(Vec::new()) };
    let number = |name: &str| name.strip_prefix(&start)?.parse::<u64>().ok();
    let mut found: Vec<(u64, PathBuf)> = names
        .flatten()
        .filter_map(|entry| Some((number(entry.file_name().to_str()?)?, entry.path())))
        .filter(|(_, path)| check_ours(path).is_ok())
        .collect();
    found.sort();
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

/// An error where a folder has anything that is no part of a checkpoint: it would be lost with the
/// one that is replaced.
fn check_ours(folder: &Path) -> Result<()> {
    if folder.symlink_metadata().is_err() {
        return Ok(());
    }
    let refuse = |reason: String| Error::Checkpoint { path: folder.to_path_buf(), reason };
    for entry in std::fs::read_dir(folder).map_err(|error| refuse(error.to_string()))? {
        let name = entry.map_err(|error| refuse(error.to_string()))?.file_name();
        let name = name.to_string_lossy();
        if name != TRAINING && name != STATES && !name.ends_with(".part") {
            return Err(refuse(format!("holds '{name}', which is no part of a checkpoint; name another folder")));
        }
    }
    Ok(())
}
