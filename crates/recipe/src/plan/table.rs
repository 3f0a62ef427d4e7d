//! A plan as a table and as JSON.

use super::{Entry, Plan};
use crate::fold::ranges;
use crate::keywords::{ACCUMULATORS, POLICIES};
use crate::role::{Consumer, Site, Slot};
use nvfp4::format::keywords::keyword;
use nvfp4::format::{ColumnSource, Family, QuantSpec};
use nvfp4::{Finite, Side};
use serde_json::{Value, json};
use std::fmt;

const HEADINGS: [&str; 5] = ["MODULE", "SLOT", "ROW", "COLUMN", "BECAUSE OF"];

/// Modules that differ in one number and resolve alike share lines; so do experts, and neighbouring
/// tensors of a module.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lines: Vec<[String; 5]> = vec![HEADINGS.map(str::to_string)];
        for group in groups(&self.entries) {
            let mut module = group.module();
            let alike = |a: &&Entry, b: &&Entry| a.spec == b.spec && a.reason == b.reason;
            for entries in group.entries.chunk_by(alike) {
                let slots: Vec<String> = entries.iter().map(|entry| slot(entry, group.experts)).collect();
                let [row, col] = cells(&entries[0].spec);
                let reason = entries[0].reason.to_string();
                lines.push([std::mem::take(&mut module), slots.join(", "), row, col, reason]);
            }
        }
        let widths: Vec<usize> =
            (0..5).map(|i| lines.iter().map(|l| l[i].chars().count()).max().unwrap_or(0)).collect();
        for line in &lines {
            let cells: Vec<String> = line.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}")).collect();
            writeln!(f, "{}", cells.join("  ").trim_end())?;
        }
        for (mode, paths) in self.attention_modes() {
            writeln!(f, "attention: {mode} in {paths}")?;
        }
        let runs: Vec<String> = self.runs.iter().map(|(family, runs)| format!("{family} {runs}")).collect();
        if !runs.is_empty() {
            writeln!(f, "runs: {}", runs.join(", "))?;
        }
        if self.has_fp8() {
            writeln!(f, "sums of FP8 on a GPU: {}", self.accumulators)?;
        }
        if self.finite == Finite::Refuse {
            writeln!(f, "NaN and infinities: refused in tensors that are quantized")?;
        }
        self.warnings.iter().try_for_each(|warning| writeln!(f, "warning: {warning}"))
    }
}

impl Plan {
    /// The plan as JSON: {recipe, fingerprint, finite, tensors, attention, runs, accumulators,
    /// warnings}, one entry per tensor.
    pub fn to_json(&self) -> Value {
        let consumers = |entry: &Entry| match &entry.role.consumer {
            None => Value::Null,
            Some(Consumer::HighPrecision) => json!("high-precision"),
            Some(Consumer::Unknown) => json!("outside"),
            Some(Consumer::Sites(sites)) => sites.iter().map(Site::to_string).collect(),
        };
        let tensors: Vec<Value> = self
            .entries
            .iter()
            .map(|entry| {
                json!({
                    "module": entry.role.path().as_str(),
                    "slot": entry.role.slot().to_string(),
                    "pass": entry.role.pass().to_string(),
                    "consumer": consumers(entry),
                    "spec": entry.spec,
                    "row": entry.spec.format(Side::Row).to_string(),
                    "column": entry.spec.format(Side::Column).to_string(),
                    "reason": entry.reason.to_string(),
                    // An earlier name.
                    "because": entry.reason.to_string(),
                })
            })
            .collect();
        let attention: Value =
            self.attention.iter().map(|(path, mode)| (path.to_string(), json!(mode.to_string()))).collect();
        let runs: Value =
            self.runs.iter().map(|(family, runs)| (family.to_string(), json!(runs.to_string()))).collect();
        let warnings: Vec<String> = self.warnings.iter().map(ToString::to_string).collect();
        json!({
            "recipe": self.recipe,
            "fingerprint": format!("{:016x}", self.fingerprint()),
            "finite": keyword(POLICIES, self.finite),
            "tensors": tensors,
            "attention": attention,
            "runs": runs,
            "accumulators": {
                "fprop": keyword(ACCUMULATORS, self.accumulators.fprop),
                "dgrad": keyword(ACCUMULATORS, self.accumulators.dgrad),
                "wgrad": keyword(ACCUMULATORS, self.accumulators.wgrad),
            },
            "warnings": warnings,
        })
    }

    /// Whether products may meet FP8 on both sides.
    fn has_fp8(&self) -> bool {
        self.runs.keys().any(|family| matches!(family, Family::Fp8 | Family::Fp8Block))
    }

    /// Each mode of attention and the modules that have it.
    fn attention_modes(&self) -> Vec<(String, String)> {
        let mut modes: Vec<(String, Vec<String>)> = Vec::new();
        for module in &self.modules {
            let Some(mode) = self.attention.get(module.path()).map(ToString::to_string) else { continue };
            match modes.iter_mut().find(|(m, _)| *m == mode) {
                Some((_, paths)) => paths.push(module.path().to_string()),
                None => modes.push((mode, vec![module.path().to_string()])),
            }
        }
        let join = |paths: Vec<String>| match paths.len() {
            n @ 3.. => format!("{} … {} ({n} modules)", paths[0], paths[n - 1]),
            _ => paths.join(", "),
        };
        modes.into_iter().map(|(mode, paths)| (mode, join(paths))).collect()
    }
}

/// The cells of a spec: row format, column format.
fn cells(spec: &QuantSpec) -> [String; 2] {
    let col = spec.format(Side::Column).to_string();
    let source = match spec.source() {
        ColumnSource::Original => "",
        ColumnSource::RowDequantized => " from row",
    };
    [spec.format(Side::Row).to_string(), format!("{col}{source}")]
}

fn slot(entry: &Entry, experts: u32) -> String {
    let slot = match entry.role.slot() {
        Slot::Grouped { slot, .. } if experts > 1 => format!("{}[0-{}]", slot.name(), experts - 1),
        slot => slot.to_string(),
    };
    match &entry.role.consumer {
        Some(Consumer::Sites(sites)) => {
            let sites: Vec<String> = sites.iter().map(Site::to_string).collect();
            format!("{slot} → {}", sites.join(", "))
        }
        Some(Consumer::Unknown) => format!("{slot} → outside"),
        None | Some(Consumer::HighPrecision) => slot,
    }
}

/// Modules that resolve alike, with the entries of the first.
struct Group<'a> {
    before: String,
    numbers: Vec<u64>,
    after: String,
    experts: u32,
    entries: Vec<&'a Entry>,
}

impl Group<'_> {
    /// The path, with ranges for the number that differs.
    fn module(&self) -> String {
        format!("{}{}{}", self.before, ranges(&self.numbers), self.after)
    }

    /// Whether another module has the same line: the same path but for the number, the same specs
    /// for the same reasons.
    fn like(&self, other: &Group<'_>) -> bool {
        let same = |(a, b): (&&Entry, &&Entry)| {
            let slots = a.role.slot() == b.role.slot() && a.spec == b.spec && a.reason == b.reason;
            slots && (a.role.consumer == b.role.consumer || self.neighbours(a, other, b))
        };
        let numbered = !self.numbers.is_empty() && !other.numbers.is_empty();
        let paths = self.before == other.before && self.after == other.after && self.experts == other.experts;
        numbered
            && paths
            && self.entries.len() == other.entries.len()
            && self.entries.iter().zip(&other.entries).all(same)
    }

    /// Whether two tensors go to the same neighbours within their own layers.
    fn neighbours(&self, a: &Entry, other: &Group<'_>, b: &Entry) -> bool {
        let (Some(Consumer::Sites(a)), Some(Consumer::Sites(b))) = (&a.role.consumer, &b.role.consumer) else {
            return false;
        };
        let within = |site: &Site, number: u64| {
            let path =
                site.path.as_str().replacen(&format!("{}{number}.", self.before), &format!("{}*.", self.before), 1);
            (path, site.slot.clone())
        };
        let (first, second) = (self.numbers[0], other.numbers[0]);
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| within(a, first) == within(b, second))
    }
}

fn groups(entries: &[Entry]) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    for module in entries.chunk_by(|a, b| a.role.path() == b.role.path()) {
        let path = module[0].role.path();
        let segments: Vec<&str> = path.segments().collect();
        let number =
            segments.iter().position(|segment| segment.parse::<u64>().is_ok_and(|n| n.to_string() == *segment));
        let (before, numbers, after) = match number {
            None => (path.to_string(), vec![], String::new()),
            Some(i) => {
                let part = |segments: &[&str], text: fn(&str) -> String| segments.iter().map(|s| text(s)).collect();
                let before: String = part(&segments[..i], |s| format!("{s}."));
                (before, segments[i].parse().into_iter().collect(), part(&segments[i + 1..], |s| format!(".{s}")))
            }
        };
        let expert = |entry: &Entry| match entry.role.slot() {
            Slot::Grouped { expert, .. } => Some(*expert),
            _ => None,
        };
        let experts = module.iter().filter_map(expert).max().map_or(0, |expert| expert + 1);
        let entries = module.iter().filter(|entry| expert(entry).is_none_or(|expert| expert == 0)).collect();
        let group = Group { before, numbers, after, experts, entries };
        match groups.iter_mut().find(|other| other.like(&group)) {
            Some(other) => other.numbers.extend(group.numbers),
            None => groups.push(group),
        }
    }
    groups
}
