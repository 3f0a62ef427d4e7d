//! What one source file says about modules: those that it declares, what it re-exports, and the
//! paths that it names. Not a parser: it knows words, paths and braces.

use std::collections::{BTreeMap, BTreeSet};

/// What a file says.
#[derive(Default)]
pub(super) struct Source {
    /// Its path in `src`.
    pub file: String,
    /// The modules that it declares as files of their own.
    pub children: BTreeSet<String>,
    /// What it re-exports: the name, and the path from the root that it stands for.
    pub exports: BTreeMap<String, Vec<String>>,
    /// The paths from the root that it names.
    pub imports: Vec<Import>,
}

pub(super) struct Import {
    pub path: Vec<String>,
    pub line: usize,
}

struct Token<'a> {
    text: &'a str,
    line: usize,
}

impl Source {
    /// Reads the text of the module at `path`.
    pub fn read(file: String, text: &str, path: &[String]) -> Source {
        let tokens = without_tests(tokens(text));
        let mut source = Source { file, ..Source::default() };
        let mut reader = Reader { tokens: &tokens, at: 0, module: path.to_vec(), inline: Vec::new() };
        reader.read(&mut source, path);
        source
    }
}

struct Reader<'a> {
    tokens: &'a [Token<'a>],
    at: usize,
    /// The path of the module that is read, inline ones included.
    module: Vec<String>,
    /// How deep the braces of each open inline module are.
    inline: Vec<usize>,
}

impl Reader<'_> {
    fn word(&self, ahead: usize) -> &str {
        self.tokens.get(self.at + ahead).map_or("", |token| token.text)
    }

    fn read(&mut self, source: &mut Source, file: &[String]) {
        let mut depth = 0;
        while self.at < self.tokens.len() {
            match (self.word(0), self.word(2)) {
                ("mod", ";") => {
                    if self.module == file {
                        source.children.insert(self.word(1).to_string());
                    }
                    self.at += 3;
                }
                ("mod", "{") => {
                    self.module.push(self.word(1).to_string());
                    self.inline.push(depth);
                    depth += 1;
                    self.at += 3;
                }
                ("use", _) => {
                    let public = self.at > 0 && matches!(self.tokens[self.at - 1].text, "pub" | ")");
                    self.at += 1;
                    let mut named = Vec::new();
                    self.tree(Vec::new(), &mut named);
                    for (path, name, line) in named {
                        let Some(path) = self.absolute(&path, source) else { continue };
                        if public && self.module == file {
                            source.exports.insert(name, path.clone());
                        }
                        source.imports.push(Import { path, line });
                    }
                }
                ("crate" | "super" | "self", _) if self.word(1) == "::" => {
                    let line = self.tokens[self.at].line;
                    let mut path = vec![self.word(0).to_string()];
                    while self.word(1) == "::" && is_name(self.word(2)) {
                        path.push(self.word(2).to_string());
                        self.at += 2;
                    }
                    self.at += 1;
                    if let Some(path) = self.absolute(&path, source) {
                        source.imports.push(Import { path, line });
                    }
                }
                (word, _) => {
                    match word {
                        "{" => depth += 1,
                        "}" => {
                            depth -= 1;
                            if self.inline.last() == Some(&depth) {
                                self.inline.pop();
                                self.module.pop();
                            }
                        }
                        _ => {}
                    }
                    self.at += 1;
                }
            }
        }
    }

    /// The paths of a `use`, each with the name that it gets and its line.
    fn tree(&mut self, mut path: Vec<String>, named: &mut Vec<(Vec<String>, String, usize)>) {
        loop {
            let line = self.tokens.get(self.at).map_or(0, |token| token.line);
            match self.word(0) {
                "{" => {
                    self.at += 1;
                    while !matches!(self.word(0), "}" | "") {
                        self.tree(path.clone(), named);
                        if self.word(0) == "," {
                            self.at += 1;
                        }
                    }
                    self.at += 1;
                    return;
                }
                word if is_name(word) => {
                    // `use a::{self}` names `a`.
                    if word != "self" || path.is_empty() {
                        path.push(word.to_string());
                    }
                    self.at += 1;
                    match self.word(0) {
                        "::" => self.at += 1,
                        "as" => {
                            let name = self.word(1).to_string();
                            self.at += 2;
                            return named.push((path, name, line));
                        }
                        _ => {
                            let name = path.last().cloned().unwrap_or_default();
                            return named.push((path, name, line));
                        }
                    }
                }
                // A glob imports the module; a leading `::` another crate.
                _ => {
                    self.at += 1;
                    return named.push((path, "*".to_string(), line));
                }
            }
        }
    }

    /// A path from the root; none if it leads to another crate.
    fn absolute(&self, path: &[String], source: &Source) -> Option<Vec<String>> {
        let (mut from, mut rest) = (self.module.clone(), path);
        match path.first()?.as_str() {
            "crate" => (from, rest) = (Vec::new(), &path[1..]),
            "self" => rest = &path[1..],
            "super" => {}
            // A child that was declared above, as in `pub use child::Name`.
            name if source.children.contains(name) => {}
            _ => return None,
        }
        while let Some(("super", after)) = rest.split_first().map(|(first, after)| (first.as_str(), after)) {
            from.pop();
            rest = after;
        }
        from.extend(rest.iter().cloned());
        Some(from)
    }
}

fn is_name(word: &str) -> bool {
    word.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Leaves out the items behind `#[cfg(test)]`, or a `#[cfg]` that asks for tests and more.
fn without_tests(mut tokens: Vec<Token<'_>>) -> Vec<Token<'_>> {
    let mut at = 0;
    while at + 1 < tokens.len() {
        let end = match (tokens[at].text, tokens[at + 1].text) {
            ("#", "[") => closing(&tokens, at + 1),
            _ => at,
        };
        let attribute: Vec<&str> = tokens[at..end].iter().skip(2).map(|token| token.text).collect();
        let is_cfg = attribute.first() == Some(&"cfg");
        if is_cfg && attribute.contains(&"test") && !attribute.contains(&"not") {
            tokens.drain(at..item_end(&tokens, end + 1));
        } else {
            at = end + 1;
        }
    }
    tokens
}

/// The end of the item at `start`: behind its semicolon or its braces.
fn item_end(tokens: &[Token<'_>], start: usize) -> usize {
    let mut at = start;
    while let Some(token) = tokens.get(at) {
        match token.text {
            ";" => return at + 1,
            "{" => return (closing(tokens, at) + 1).min(tokens.len()),
            "[" | "(" => at = closing(tokens, at) + 1,
            _ => at += 1,
        }
    }
    tokens.len()
}

/// Where the bracket at `open` is closed.
fn closing(tokens: &[Token<'_>], open: usize) -> usize {
    let mut depth = 0;
    for (i, token) in tokens.iter().enumerate().skip(open) {
        match token.text {
            "{" | "[" | "(" => depth += 1,
            "}" | "]" | ")" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return i;
        }
    }
    tokens.len()
}

/// Names, `::` and single signs, without comments and what stands in quotes.
fn tokens(text: &str) -> Vec<Token<'_>> {
    let bytes = text.as_bytes();
    let (mut at, mut line, mut out) = (0, 1, Vec::new());
    while at < bytes.len() {
        let rest = &text[at..];
        let first = rest.chars().next().expect("there is more text");
        let len = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if let Some(len) = quoted(rest) {
            len
        } else if is_name(rest) {
            let len = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            out.push(Token { text: &rest[..len], line });
            len
        } else if rest.starts_with("::") {
            out.push(Token { text: &rest[..2], line });
            2
        } else {
            if !first.is_whitespace() {
                out.push(Token { text: &rest[..first.len_utf8()], line });
            }
            first.len_utf8()
        };
        line += rest[..len].matches('\n').count();
        at += len;
    }
    out
}

/// The length of the string or character that the text begins with. A lifetime is neither.
fn quoted(text: &str) -> Option<usize> {
    let prefixed = text.trim_start_matches(['b', 'c']);
    if let Some(raw) = prefixed.strip_prefix('r') {
        let hashes = raw.len() - raw.trim_start_matches('#').len();
        if raw[hashes..].starts_with('"') {
            let end = format!("\"{}", "#".repeat(hashes));
            let start = text.len() - raw.len() + hashes + 1;
            return Some(text[start..].find(&end).map_or(text.len(), |at| start + at + end.len()));
        }
    }
    let start = text.len() - prefixed.len();
    if let Some(body) = prefixed.strip_prefix('"') {
        return Some(start + 1 + until(body, '"'));
    }
    if let Some(body) = prefixed.strip_prefix('\'') {
        let mut chars = body.chars();
        let (one, two) = (chars.next()?, chars.next()?);
        if one == '\\' || two == '\'' {
            return Some(start + 1 + until(body, '\''));
        }
    }
    None
}

/// The length of a text up to and with the quote that ends it.
fn until(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        if c == quote && !escaped {
            return at + 1;
        }
        escaped = c == '\\' && !escaped;
    }
    text.len()
}
