//! State in files: plain numbers in safetensors, with a version. Nothing in a file is ever
//! executed.
//!
//! Entry `i` is the tensors `i.history` (F32, [steps]) and `i.scale` (F32, []). The metadata holds
//! `format = nvfp4-recipe-state`, `version = 1` and, under `entries`, a JSON list that gives each
//! entry's site, directions and spec.

use super::{Key, States};
use crate::Result;
use crate::plan::Plan;
use nvfp4::format::{AmaxRules, QuantSpec};
use nvfp4_files::container::{Checked, Container, Dtype, Part, SafeTensors, bytes, floats, stored};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

const STATE: Container = Container { format: "nvfp4-recipe-state", versions: &["1"], index: "entries" };

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    site: String,
    directions: String,
    spec: QuantSpec,
}

impl States {
    /// Writes the state to a file, which is replaced if it exists.
    pub fn save(&self, path: &Path) -> Result<()> {
        let (mut entries, mut parts) = (Vec::new(), Vec::new());
        for (i, ((site, part), state)) in self.states.iter().enumerate() {
            let spec = QuantSpec::delayed(state.config.clone());
            entries.push(Entry { site: site.to_string(), directions: part.to_string(), spec });
            let part = |what: &str, shape, values: &[f32]| Part {
                name: format!("{i}.{what}"),
                dtype: Dtype::F32,
                shape,
                bytes: bytes(values),
            };
            parts.push(part("history", vec![state.history.len()], &state.history));
            parts.push(part("scale", vec![], &[state.scale]));
        }
        Ok(STATE.write(path, STATE.versions[0], &parts, &entries)?)
    }

    /// Reads the state of a plan. A file that is truncated, foreign or of another plan is an error
    /// that says so.
    pub fn load(path: &Path, plan: &Plan, rules: AmaxRules) -> Result<Self> {
        let mut states = States::with_rules(plan, rules)?;
        STATE.read(path, |file, _, entries| states.fill(file, entries))?;
        Ok(states)
    }

    /// Takes every number from a file that has exactly this state.
    fn fill(&mut self, file: &SafeTensors<'_>, entries: Vec<Entry>) -> Checked<()> {
        let mut expected: BTreeMap<(String, String), Key> =
            self.states.keys().map(|key| ((key.0.to_string(), key.1.to_string()), key.clone())).collect();
        if file.len() != 2 * entries.len() {
            return Err(format!("expected {} tensors, got {}", 2 * entries.len(), file.len()));
        }
        for (i, Entry { site, directions, spec }) in entries.into_iter().enumerate() {
            let key = expected.remove(&(site.clone(), directions.clone()));
            let key =
                key.ok_or_else(|| format!("{site} ({directions}): the plan has no such state, or it stands twice"))?;
            let state = self.states.get_mut(&key).expect("made from these states");
            let planned = QuantSpec::delayed(state.config.clone());
            if spec != planned {
                return Err(format!("{site} ({directions}): the file has {spec}, the plan {planned}"));
            }
            let read = |what, shape: &[usize]| {
                stored(file, &format!("{i}.{what}"), &[Dtype::F32], &[shape]).map(|view| floats(&view))
            };
            state.history = read("history", &[state.history.len()])?;
            state.scale = read("scale", &[])?[0];
            if let Some(amax) = state.history.iter().find(|amax| **amax < 0.0) {
                return Err(format!("{site}: expected amaxes of at least 0, got {amax}"));
            }
            if !(state.scale.is_finite() && state.scale > 0.0) {
                return Err(format!("{site}: expected a scale above 0, got {}", state.scale));
            }
        }
        match expected.into_keys().next() {
            None => Ok(()),
            Some((site, directions)) => Err(format!("{site} ({directions}): the file has no such state")),
        }
    }
}
