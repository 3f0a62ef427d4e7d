//! Which weight gets which form: the rules of a file, or of a preset.

use super::form::Form;
use super::names::{Pattern, Preset};
use crate::{Error, Result};
use std::fmt;
use std::str::FromStr;
use toml::de::{DeTable, DeValue};

/// Rules, of which the first that matches a module decides.
///
/// ```
/// use nvfp4_checkpoint::{Form, Rules};
///
/// let rules = Rules::from_toml(
///     r#"
/// [[rule]]
/// path = "**.experts.**"
/// form = "nvfp4"
///
/// [[rule]]
/// path = ["**.self_attn.*", "re:.*shared_expert.*"]
/// form = "fp8"
///
/// [default]
/// form = "keep"
/// "#,
/// )?;
/// assert_eq!(rules.form("model.layers.0.mlp.experts.7.up_proj"), Some(Form::Nvfp4));
/// assert_eq!(rules.form("model.layers.0.self_attn.q_proj"), Some(Form::Fp8));
/// assert_eq!(rules.form("model.layers.0.mlp.up_proj"), Some(Form::Keep));
/// # Ok::<(), nvfp4_checkpoint::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Rules {
    rules: Vec<Rule>,
    default: Option<Form>,
    /// Weights of this part get NVFP4 after all rules.
    part: Option<Preset>,
}

#[derive(Clone, Debug)]
struct Rule {
    paths: Vec<Pattern>,
    form: Form,
}

impl Rules {
    /// Reads a rule file. `path` is a pattern over whole names of modules, or several; `form` is
    /// what they get; `[default]` is for weights that no rule matches.
    pub fn from_toml(text: &str) -> Result<Self> {
        let wrong = |what: &str, reason: String| Error::Refused(format!("{what}: {reason}"));
        let file = DeTable::parse(text).map_err(|e| wrong("rules", e.to_string().trim().to_string()))?;
        let file = file.get_ref();
        known(file, &["name", "rule", "default"]).map_err(|reason| wrong("rules", reason))?;
        let mut rules = Rules::default();
        if let Some(entries) = file.get("rule") {
            let entries = entries.get_ref().as_array();
            let entries =
                entries.ok_or_else(|| wrong("rules", "rules are written [[rule]], with two brackets".into()))?;
            for (i, entry) in entries.iter().enumerate() {
                let rule = rule(entry.get_ref()).map_err(|reason| wrong(&format!("rule {}", i + 1), reason))?;
                rules.rules.push(rule);
            }
        }
        if let Some(default) = file.get("default") {
            let form = default.get_ref().as_table().ok_or("expected a table, [default]".to_string());
            let form = form.and_then(|table| known(table, &["form"]).and_then(|()| self::form(table)));
            rules.default = Some(form.map_err(|reason| wrong("[default]", reason))?);
        }
        Ok(rules)
    }

    /// The form of a module; none where neither a rule nor a default has one.
    pub fn form(&self, module: &str) -> Option<Form> {
        let matching = self.rules.iter().find(|rule| rule.paths.iter().any(|path| path.matches(module)));
        let part = || self.part.filter(|part| part.has(module)).map(|_| Form::Nvfp4);
        matching.map(|rule| rule.form).or_else(part).or(self.default)
    }

    /// Whether a rule names this module, and not only a pattern that it matches: such a rule also
    /// holds for what is kept by default.
    pub(super) fn names(&self, module: &str) -> bool {
        let first = self.rules.iter().find(|rule| rule.paths.iter().any(|path| path.matches(module)));
        first.is_some_and(|rule| rule.paths.iter().any(|path| path.to_string() == module))
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty() && self.default.is_none() && self.part.is_none()
    }

    /// The patterns of all rules.
    pub(super) fn patterns(&self) -> impl Iterator<Item = &Pattern> {
        self.rules.iter().flat_map(|rule| &rule.paths)
    }
}

/// An error if a table has other keys.
fn known(table: &DeTable<'_>, keys: &[&str]) -> std::result::Result<(), String> {
    match table.keys().find(|key| !keys.contains(&key.get_ref().as_ref())) {
        Some(key) => Err(format!("unknown key '{}', expected {}", key.get_ref(), keys.join(", "))),
        None => Ok(()),
    }
}

fn form(table: &DeTable<'_>) -> std::result::Result<Form, String> {
    let form = table.get("form").and_then(|form| form.get_ref().as_str()).ok_or("no form, such as form = \"fp8\"")?;
    form.parse().map_err(|error: Error| error.to_string())
}

fn rule(entry: &DeValue<'_>) -> std::result::Result<Rule, String> {
    let table = entry.as_table().ok_or("expected a table, [[rule]]")?;
    known(table, &["path", "form"])?;
    let expected = "no path: expected a pattern, or a list of patterns";
    let paths = match table.get("path").map(|path| path.get_ref()).ok_or(expected)? {
        DeValue::String(path) => vec![path.as_ref()],
        DeValue::Array(paths) => {
            paths.iter().map(|path| path.get_ref().as_str().ok_or(expected)).collect::<std::result::Result<_, _>>()?
        }
        _ => return Err(expected.to_string()),
    };
    let parse = |path: &&str| path.parse().map_err(|error: Error| error.to_string());
    Ok(Rule { paths: paths.iter().map(parse).collect::<std::result::Result<_, _>>()?, form: form(table)? })
}

/// What decides about bytes, for a conversion that is continued.
impl fmt::Display for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for rule in &self.rules {
            let paths: Vec<String> = rule.paths.iter().map(Pattern::to_string).collect();
            writeln!(f, "{}: {}", paths.join(", "), rule.form)?;
        }
        if let Some(part) = self.part {
            writeln!(f, "part {part}: nvfp4")?;
        }
        self.default.map_or(Ok(()), |form| writeln!(f, "default: {form}"))
    }
}

impl Rules {
    /// A preset by its name: a part of the model in NVFP4, or rules that give every weight a form.
    pub fn preset(name: &str) -> Result<(Preset, Rules)> {
        if let Ok(part) = name.parse() {
            return Ok((part, Rules::default()));
        }
        let rules = name.parse().map_err(|_: Error| {
            let known = "all, mlp, experts, mlp+o, experts+fp8, mlp+fp8 or fp8";
            Error::Refused(format!("expected {known}, got '{name}'"))
        })?;
        Ok((Preset::All, rules))
    }
}

/// `experts+fp8` and `mlp+fp8` (a part in NVFP4, the rest in FP8), and `fp8`.
impl FromStr for Rules {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mixed = |part| Rules { rules: Vec::new(), default: Some(Form::Fp8), part };
        match text {
            "experts+fp8" => Ok(mixed(Some(Preset::Experts))),
            "mlp+fp8" => Ok(mixed(Some(Preset::Mlp))),
            "fp8" => Ok(mixed(None)),
            _ => Err(Error::Refused(format!("expected experts+fp8, mlp+fp8 or fp8, got '{text}'"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::form::Eight;

    #[test]
    fn the_first_rule_that_matches_decides() {
        let rules = Rules::from_toml(
            "[[rule]]\npath = \"*.down_proj\"\nform = \"fp8-block\"\n[[rule]]\npath = [\"l.0.*\", \"lm_head\"]\nform = \"mxfp8\"",
        )
        .unwrap();
        assert_eq!(rules.form("l.0.down_proj"), Some(Form::Eight(Eight::Block)));
        assert_eq!(rules.form("l.0.up_proj"), Some(Form::Eight(Eight::Mx)));
        assert_eq!(rules.form("l.1.up_proj"), None);
        assert!(rules.names("lm_head") && !rules.names("l.0.up_proj"));
        assert_eq!(rules.to_string(), "*.down_proj: fp8-block\nl.0.*, lm_head: mxfp8\n");
    }

    #[test]
    fn presets_put_a_part_in_nvfp4_and_the_rest_in_fp8() {
        let form = |preset: &str, module: &str| preset.parse::<Rules>().unwrap().form(module);
        let modules = ["l.self_attn.q_proj", "l.mlp.up_proj", "l.mlp.experts.0.up_proj"];
        let forms = |preset: &str| modules.map(|module| form(preset, module).unwrap());
        assert_eq!(forms("experts+fp8"), [Form::Fp8, Form::Fp8, Form::Nvfp4]);
        assert_eq!(forms("mlp+fp8"), [Form::Fp8, Form::Nvfp4, Form::Nvfp4]);
        assert_eq!(forms("fp8"), [Form::Fp8; 3]);
        assert!("all+fp8".parse::<Rules>().is_err());
    }

    #[test]
    fn mistakes_are_named() {
        let error = |text: &str| Rules::from_toml(text).unwrap_err().to_string();
        assert!(error("[[rule]]\npath = \"*\"\nform = \"fp9\"").starts_with("rule 1: expected a form (nvfp4,"));
        assert!(error("[[rule]]\npath = \"*\"\nspec = \"fp8\"").contains("unknown key 'spec'"));
        assert!(error("[[rule]]\npath = \"re:(\"\nform = \"fp8\"").starts_with("rule 1: the pattern 're:('"));
        assert!(Rules::default().is_empty());
    }
}
