//! Reads a rule file, and collects all that is wrong with it.

use super::{Action, ModuleWord, Rule, Rules, SlotWord};
use crate::accumulators::Accumulators;
use crate::attention::AttentionPrecision;
use crate::backward::BackwardOverride;
use crate::keywords::{ACCUMULATORS, POLICIES, TRANSFORMS};
use crate::path::Glob;
use crate::presets::Preset;
use crate::problem::{Problem, Problems};
use crate::role::{AttentionSlot, LinearSlot, Pass};
use crate::training::{Nvfp4Training, SCOPES, Scope};
use nvfp4::format::is_name;
use nvfp4::format::keywords::{ERROR_PATHS, GLOBALS, Keywords, METRICS, ROUNDINGS, TILES, find, list};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

const MODULES: &[(&str, ModuleWord)] = &[
    ("linear", ModuleWord::Linear),
    ("grouped", ModuleWord::Grouped),
    ("attention", ModuleWord::Attention),
    ("extension", ModuleWord::Extension),
];
const PASSES: &[(&str, Pass)] = &[("forward", Pass::Forward), ("backward", Pass::Backward)];
const BACKWARDS: &[(&str, BackwardOverride)] = &[
    ("none", BackwardOverride::None),
    ("high-precision", BackwardOverride::HighPrecision),
    ("dequantized", BackwardOverride::Dequantized),
];
const ATTENTIONS: &[(&str, AttentionPrecision)] = &[
    ("high-precision", AttentionPrecision::HighPrecision),
    ("fp8", AttentionPrecision::Fp8),
    ("mxfp8", AttentionPrecision::Mxfp8),
];

impl Rules {
    /// Reads a file; all that is wrong with it is reported.
    pub fn parse(text: &str) -> std::result::Result<Rules, Problems> {
        let mut reader = Reader { text, problems: Vec::new(), switches: Switches::Unused };
        let rules = reader.file();
        match (rules, reader.problems) {
            (Some(rules), problems) if problems.is_empty() => Ok(rules),
            (_, mut problems) => {
                problems.sort_by_key(|problem| match problem {
                    Problem::File { line, .. } => *line,
                    _ => 0,
                });
                Err(Problems(problems))
            }
        }
    }
}

fn glob(text: &str) -> std::result::Result<Glob, String> {
    let glob = Glob::new(text);
    match glob.is_valid() {
        true => Ok(glob),
        false => Err(format!(
            "path: no module fits '{text}'; use names joined by dots, with `*`, `?` and `**`, and a list for alternatives"
        )),
    }
}

fn slot_word(text: &str) -> std::result::Result<SlotWord, String> {
    if let Some((kind, slot)) = text.split_once(':') {
        return match is_name(kind) && is_name(slot) {
            true => Ok(SlotWord::Extension(text.to_string())),
            false => {
                Err(format!("unknown slot '{text}'; a user's slot is kind:slot, each of letters, digits, `_` and `-`"))
            }
        };
    }
    let linear = LinearSlot::ALL.into_iter().find(|slot| slot.name() == text).map(SlotWord::Linear);
    let attention = || AttentionSlot::ALL.into_iter().find(|slot| slot.name() == text).map(SlotWord::Attention);
    linear.or_else(attention).ok_or_else(|| {
        let names = LinearSlot::ALL.map(LinearSlot::name).into_iter();
        let names: Vec<_> = names.chain(AttentionSlot::ALL.map(AttentionSlot::name)).collect();
        format!("unknown slot '{text}'; there are {}, and kind:slot for users' modules", names.join(", "))
    })
}

/// Walks through a file and collects what is wrong with it.
struct Reader<'a> {
    text: &'a str,
    problems: Vec<Problem>,
    switches: Switches,
}

/// Whether anything in a file has the switches of `[nvfp4]`.
#[derive(Clone, Copy)]
enum Switches {
    Unused,
    Used,
}

type Value<'a> = Spanned<DeValue<'a>>;

impl<'a> Reader<'a> {
    fn line(&self, at: usize) -> usize {
        1 + self.text.as_bytes()[..at.min(self.text.len())].iter().filter(|&&b| b == b'\n').count()
    }

    fn problem(&mut self, at: usize, reason: impl Into<String>) {
        self.problems.push(Problem::File { file: None, line: self.line(at), reason: reason.into() });
    }

    fn file(&mut self) -> Option<Rules> {
        let (table, errors) = DeTable::parse_recoverable(self.text);
        for error in &errors {
            self.problem(error.span().map_or(0, |span| span.start), error.message());
        }
        if !errors.is_empty() {
            return None;
        }
        let table = table.get_ref();
        self.keys(
            table,
            "a rule file",
            &["name", "backward", "finite", "rule", "default", "nvfp4", "accumulators", "require"],
        );
        let name = table.get("name").and_then(|value| self.text(value, "name")).unwrap_or("rules".to_string());
        let backward = table.get("backward").and_then(|value| self.word(value, "backward", BACKWARDS));
        let finite = table.get("finite").and_then(|value| self.word(value, "finite", POLICIES)).unwrap_or_default();
        let switches = table.get("nvfp4");
        let training = switches.and_then(|value| self.table(value, "[nvfp4]")).map(|table| self.training(table));
        let attention = table.get("require").and_then(|value| self.table(value, "[require]")).and_then(|table| {
            self.keys(table, "[require]", &["attention"]);
            table.get("attention").and_then(|value| self.word(value, "attention", ATTENTIONS))
        });
        let rules = match table.get("rule") {
            None => Vec::new(),
            Some(value) => match value.get_ref().as_array() {
                Some(array) => array.iter().filter_map(|value| self.rule(value, training)).collect(),
                None => {
                    self.problem(value.span().start, "rules are written [[rule]], with two brackets");
                    Vec::new()
                }
            },
        };
        let default = match table.get("default") {
            None => {
                let reason =
                    "there is no [default]: give the spec of tensors that no rule fits, as in `preset = \"nvfp4\"`";
                self.problem(self.text.len(), reason);
                None
            }
            Some(value) => self.table(value, "[default]").and_then(|table| {
                self.keys(table, "[default]", &["spec", "preset"]);
                self.action(table, value.span().start, "[default]", training)
            }),
        };
        if let (Some(switches), Switches::Unused, []) = (switches, self.switches, &self.problems[..]) {
            let reason = "[nvfp4] has the switches of `preset = \"nvfp4\"`, which no rule and no [default] has; \
                          use that preset or leave [nvfp4] out";
            self.problem(switches.span().start, reason);
        }
        let accumulators = table.get("accumulators").and_then(|value| self.table(value, "[accumulators]"));
        let default = default?;
        // Those of the default, but for what the file says.
        let accumulators = accumulators.map_or(default.accumulators(), |table| self.accumulators(table, &default));
        let backward = backward.unwrap_or_default();
        Some(Rules { name, backward, attention, finite, accumulators, rules, default })
    }

    fn rule(&mut self, value: &Value<'a>, training: Option<Nvfp4Training>) -> Option<Rule> {
        let at = value.span().start;
        let table = self.table(value, "a rule")?;
        self.keys(table, "a rule", &["path", "module", "slot", "pass", "spec", "preset"]);
        let paths = table.get("path").map(|value| self.texts(value, "path")).unwrap_or_default();
        let modules = table.get("module").map(|value| self.texts(value, "module")).unwrap_or_default();
        let slots = table.get("slot").map(|value| self.texts(value, "slot")).unwrap_or_default();
        let pass = table.get("pass").and_then(|value| self.word(value, "pass", PASSES));
        let modules = self.each(modules, |text| {
            find(MODULES, text).ok_or_else(|| format!("unknown module '{text}'; there are {}", list(MODULES)))
        });
        let slots = self.each(slots, slot_word);
        let paths = self.each(paths, glob);
        let action = self.action(table, at, "a rule", training)?;
        Some(Rule { line: self.line(at), paths, modules, slots, pass, action })
    }

    /// What a rule or the default decides: exactly one of `spec` and `preset`.
    fn action(
        &mut self,
        table: &DeTable<'a>,
        at: usize,
        what: &str,
        training: Option<Nvfp4Training>,
    ) -> Option<Action> {
        let (value, key) = match (table.get("spec"), table.get("preset")) {
            (Some(value), None) => (value, "spec"),
            (None, Some(value)) => (value, "preset"),
            (Some(_), Some(_)) => {
                self.problem(at, format!("{what} has `spec` and `preset`; leave one out"));
                return None;
            }
            (None, None) => {
                self.problem(at, format!("{what} needs `spec` or `preset`, as in `spec = \"high-precision\"`"));
                return None;
            }
        };
        let text = self.text(value, key)?;
        let action = match key {
            "spec" => text.parse().map(Action::Spec).map_err(crate::Error::from),
            _ => text.parse().map(|preset| Action::Preset(self.switched(preset, training))),
        };
        action.map_err(|error| self.problem(value.span().start, error.to_string())).ok()
    }

    /// The preset with the switches of `[nvfp4]`, if they are for it.
    fn switched(&mut self, preset: Preset, training: Option<Nvfp4Training>) -> Preset {
        match training.and_then(|training| preset.with_training(training)) {
            Some(switched) => {
                self.switches = Switches::Used;
                switched
            }
            None => preset,
        }
    }

    fn training(&mut self, table: &DeTable<'a>) -> Nvfp4Training {
        let keys =
            ["transform", "gradients", "weights", "activations", "four-over-six", "bound-256", "metric", "error"];
        let before = self.problems.len();
        self.keys(table, "[nvfp4]", &keys);
        let mut training = Nvfp4Training::default();
        self.set(table, "transform", TRANSFORMS, &mut training.transform);
        self.set(table, "gradients", ROUNDINGS, &mut training.gradients);
        self.set(table, "weights", TILES, &mut training.weights);
        self.set(table, "activations", GLOBALS, &mut training.activations);
        self.set(table, "four-over-six", SCOPES, &mut training.four_over_six);
        self.set(table, "bound-256", SCOPES, &mut training.bound_256);
        self.set(table, "metric", METRICS, &mut training.metric);
        self.set(table, "error", ERROR_PATHS, &mut training.error);
        if training.four_over_six == Scope::None && self.problems.len() == before {
            for detail in ["bound-256", "metric", "error"] {
                let Some(value) = table.get(detail) else { continue };
                let fix = "set `four-over-six` to weights, activations or all, or leave this out";
                self.problem(value.span().start, format!("{detail} has no effect without 4over6; {fix}"));
            }
        }
        training
    }

    fn accumulators(&mut self, table: &DeTable<'a>, default: &Action) -> Accumulators {
        self.keys(table, "[accumulators]", &["fprop", "dgrad", "wgrad"]);
        let mut accumulators = default.accumulators();
        self.set(table, "fprop", ACCUMULATORS, &mut accumulators.fprop);
        self.set(table, "dgrad", ACCUMULATORS, &mut accumulators.dgrad);
        self.set(table, "wgrad", ACCUMULATORS, &mut accumulators.wgrad);
        accumulators
    }

    fn set<T: Copy>(&mut self, table: &DeTable<'a>, key: &str, words: Keywords<T>, into: &mut T) {
        if let Some(value) = table.get(key).and_then(|value| self.word(value, key, words)) {
            *into = value;
        }
    }

    fn keys(&mut self, table: &DeTable<'a>, what: &str, allowed: &[&str]) {
        for key in table.keys().filter(|key| !allowed.contains(&key.get_ref().as_ref())) {
            let reason = format!("unknown key `{}`; {what} takes {}", key.get_ref(), allowed.join(", "));
            self.problem(key.span().start, reason);
        }
    }

    fn table<'t>(&mut self, value: &'t Value<'a>, what: &str) -> Option<&'t DeTable<'a>> {
        let table = value.get_ref().as_table();
        if table.is_none() {
            self.problem(
                value.span().start,
                format!("expected a table for {what}, got {}", value.get_ref().type_str()),
            );
        }
        table
    }

    fn text(&mut self, value: &Value<'a>, key: &str) -> Option<String> {
        let text = value.get_ref().as_str().map(str::to_string);
        if text.is_none() {
            self.problem(value.span().start, format!("{key}: expected a text, got {}", value.get_ref().type_str()));
        }
        text
    }

    /// A text or a list of texts, each with its place.
    fn texts(&mut self, value: &Value<'a>, key: &str) -> Vec<(usize, String)> {
        let values: Vec<&Value<'a>> = match value.get_ref().as_array() {
            Some(array) => array.iter().collect(),
            None => vec![value],
        };
        if values.is_empty() {
            self.problem(value.span().start, format!("{key}: the list is empty; leave the key out to fit everything"));
        }
        values.into_iter().filter_map(|value| Some((value.span().start, self.text(value, key)?))).collect()
    }

    fn each<T>(
        &mut self,
        texts: Vec<(usize, String)>,
        parse: impl Fn(&str) -> std::result::Result<T, String>,
    ) -> Vec<T> {
        let parsed =
            texts.into_iter().filter_map(|(at, text)| parse(&text).map_err(|reason| self.problem(at, reason)).ok());
        parsed.collect()
    }

    fn word<T: Copy>(&mut self, value: &Value<'a>, key: &str, words: Keywords<T>) -> Option<T> {
        let text = self.text(value, key)?;
        let found = find(words, &text);
        if found.is_none() {
            self.problem(value.span().start, format!("{key}: unknown value '{text}'; there are {}", list(words)));
        }
        found
    }
}
