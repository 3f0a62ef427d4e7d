//! Names and patterns of modules in a configuration, as servers match them. Lists may have an entry
//! for each of thousands of weights, so names are looked up, and only patterns are tried one after
//! another.

use super::client::Client;
use super::dialect::Dialect;
use regex_lite::Regex;
use std::collections::{BTreeSet, HashSet};

/// A list of modules: their names, globs (`*`), and regular expressions after `re:`.
pub(super) struct Ignored<'n> {
    names: HashSet<&'n str>,
    /// The lengths of names that are also found inside of others; none where names must be whole.
    lengths: BTreeSet<usize>,
    globs: Vec<&'n str>,
    expressions: Vec<(&'n str, Regex)>,
}

impl<'n> Ignored<'n> {
    /// vLLM also finds an entry of ModelOpt's list inside a name: `mlp.gate` excludes
    /// `mlp.gate_proj` too.
    pub fn new(entries: impl Iterator<Item = &'n str>, client: Client, dialect: Dialect) -> Self {
        let parts = client == Client::Vllm && dialect == Dialect::ModelOpt;
        let (names, lengths) = (HashSet::new(), BTreeSet::new());
        let mut list = Ignored { names, lengths, globs: Vec::new(), expressions: Vec::new() };
        for entry in entries {
            if let Some(expression) = entry.strip_prefix("re:") {
                let regex = Regex::new(&format!("^(?:{expression})")).ok();
                list.expressions.extend(regex.map(|regex| (entry, regex)));
            }
            if entry.contains('*') {
                if !entry.starts_with("re:") {
                    list.globs.push(entry);
                }
                continue;
            }
            list.names.insert(entry);
            if parts {
                list.lengths.insert(entry.len());
            }
        }
        list
    }

    /// An entry that matches a module.
    pub fn matching(&self, module: &str) -> Option<&'n str> {
        let named = self.names.get(module).copied();
        let part = || {
            let ends = |len: usize| (len..=module.len()).filter_map(move |end| module.get(end - len..end));
            self.lengths.iter().flat_map(|&len| ends(len)).find_map(|part| self.names.get(part).copied())
        };
        let glob = || self.globs.iter().copied().find(|glob| matches_glob(glob, module));
        let expression = || self.expressions.iter().find(|(_, regex)| regex.is_match(module)).map(|(entry, _)| *entry);
        named.or_else(part).or_else(glob).or_else(expression)
    }
}

/// Whether a whole name matches a pattern in which `*` stands for anything.
fn matches_glob(glob: &str, name: &str) -> bool {
    let (Some((first, rest)), Some((_, last))) = (glob.split_once('*'), glob.rsplit_once('*')) else {
        return glob == name;
    };
    let Some(inner) = name.strip_prefix(first).and_then(|name| name.strip_suffix(last)) else { return false };
    let middle = rest.strip_suffix(last).unwrap_or_default();
    let mut left = inner;
    middle.split('*').all(|part| match left.find(part) {
        Some(at) => {
            left = &left[at + part.len()..];
            true
        }
        None => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_match_as_servers_match_them() {
        let cases = [
            ("lm_head", "lm_head", true, true),
            ("mlp.gate", "l.0.mlp.gate_proj", true, false),
            ("gate_prox", "l.0.mlp.gate_proj", false, false),
            ("", "a", true, false),
            ("l.0.*", "l.0.mlp", true, true),
            ("l.0.*", "l.01.mlp", false, false),
            ("*mlp*", "l.0.mlp.up", true, true),
            ("l.*.mlp.*_proj", "l.0.mlp.up_proj", true, true),
            ("l.*.mlp.*_proj", "l.0.attn.up_proj", false, false),
            ("a*a", "a", false, false),
            ("a*b*b", "ab", false, false),
            ("a**b", "ab", true, true),
            ("re:.*up", "l.0.up_proj", true, true),
            ("re:up", "l.0.up_proj", false, false),
            ("re:(", "re:(", true, true),
        ];
        for (entry, module, modelopt, compressed_tensors) in cases {
            let matches = |dialect| Ignored::new([entry].into_iter(), Client::Vllm, dialect).matching(module).is_some();
            assert_eq!(matches(Dialect::ModelOpt), modelopt, "{entry} {module}");
            assert_eq!(matches(Dialect::CompressedTensors), compressed_tensors, "{entry} {module}");
        }
    }
}
