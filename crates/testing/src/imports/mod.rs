//! Which modules of a crate import which, read from its sources, and the circles among them.
//!
//! A crate that has no circle can be read from the bottom up: whatever a module imports, a reader
//! already knows.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

mod graph;
mod tokens;

use graph::Graph;
use tokens::Source;

/// The circles among the modules of the crate whose sources are in `src`, one line each, which
/// names every module of the circle and the line of source that imports the next one. Empty if
/// there is no circle.
///
/// The rule: of two modules in the same folder, one may import the other, directly or through
/// others, but not both ways. In detail:
///
/// - A module is a file or a folder. What any file of a folder imports, the folder imports: if
///   `a/deep.rs` imports `b::x` then `a` imports `b`. The rule holds for the modules at the top and
///   within every folder.
/// - Every path in the code that begins with `crate` or `super` is an import, in a `use` line or
///   not.
/// - A name that a parent re-exports (`pub use child::Name`) is an import of that child.
/// - A child may use what its parent's own file (`mod.rs`, `lib.rs`) defines, and a parent its
///   children: neither is an import in this sense.
/// - What is compiled for tests only does not count.
///
/// # Panics
///
/// If a source cannot be read.
pub fn circles(src: impl AsRef<Path>) -> Vec<String> {
    let crate_ = Crate::read(src.as_ref());
    let mut folders: BTreeMap<Vec<String>, Graph> = BTreeMap::new();
    for (path, source) in &crate_.modules {
        for import in &source.imports {
            let target = crate_.resolve(&import.path, 0);
            let shared = path.iter().zip(&target).take_while(|(a, b)| a == b).count();
            if shared < path.len() && shared < target.len() {
                let place = format!("{}:{}", source.file, import.line);
                let folder = folders.entry(path[..shared].to_vec()).or_default();
                folder.add(&path[shared], &target[shared], place);
            }
        }
    }
    let text = |(folder, graph): (Vec<String>, Graph)| {
        let within = if folder.is_empty() { String::new() } else { format!("in {}: ", folder.join("::")) };
        graph.circles().into_iter().map(move |circle| format!("{within}{circle}"))
    };
    folders.into_iter().flat_map(text).collect()
}

/// The modules of a crate by their paths; that of the root is empty.
#[derive(Default)]
struct Crate {
    modules: BTreeMap<Vec<String>, Source>,
}

impl Crate {
    fn read(src: &Path) -> Crate {
        let mut crate_ = Crate::default();
        let root = ["lib.rs", "main.rs"].map(|name| src.join(name)).into_iter().find(|root| root.exists());
        let root = root.unwrap_or_else(|| panic!("{}: there is no lib.rs or main.rs", src.display()));
        crate_.add(src, &root, Vec::new());
        crate_
    }

    /// Reads a module, then those that it declares. Its own file says which those are, so that a
    /// file which is compiled for tests only is not found.
    fn add(&mut self, src: &Path, file: &Path, path: Vec<String>) {
        let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let name = file.strip_prefix(src).unwrap_or(file).display().to_string();
        let source = Source::read(name, &text, &path);
        let children = source.children.clone();
        self.modules.insert(path.clone(), source);
        let folder = path.iter().fold(src.to_path_buf(), |folder, name| folder.join(name));
        for child in children {
            let files = [folder.join(format!("{child}.rs")), folder.join(&child).join("mod.rs")];
            // A module with a `#[path]` of its own is not looked for.
            if let Some(file) = files.iter().find(|file| file.exists()) {
                self.add(src, file, path.iter().cloned().chain([child]).collect());
            }
        }
    }

    /// The module that defines what a path names.
    fn resolve(&self, path: &[String], depth: usize) -> Vec<String> {
        let mut module: Vec<String> = Vec::new();
        for (i, name) in path.iter().enumerate() {
            let Some(source) = self.modules.get(&module) else { break };
            if source.children.contains(name) {
                module.push(name.clone());
                continue;
            }
            // A limit, since two re-exports that name each other do not compile but may be read.
            if let Some(exported) = source.exports.get(name).filter(|_| depth < 16) {
                let rest = exported.iter().chain(&path[i + 1..]).cloned().collect::<Vec<_>>();
                return self.resolve(&rest, depth + 1);
            }
            break;
        }
        module
    }
}

#[cfg(test)]
mod tests {
    use super::circles;
    use std::fs;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// The circles of a crate with these files.
    fn found(files: &[(&str, &str)]) -> Vec<String> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("nvfp4-imports-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let src = std::env::temp_dir().join(name);
        for (file, text) in files {
            let file = src.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        let found = circles(&src);
        fs::remove_dir_all(&src).unwrap();
        found
    }

    /// What `a.rs`, `b.rs`, or the root of a crate with both say, and the circle that it is.
    #[test]
    fn imports_both_ways_are_a_circle() {
        let circle = ["a -> b (a.rs:1) -> a (b.rs:1)"].as_slice();
        let none: &[&str] = &[];
        for (lib, a, b, expected) in [
            ("", "use crate::b::B;", "use crate::a::A;", circle),
            ("", "use super::b::B;", "use std::{fmt, io}; use super::{a::A};", circle),
            ("", "use crate::{b::{self, B}};", "use crate::{a as other};", circle),
            ("", "fn f() { crate::b::f() }", "fn f() -> super::a::A { loop {} }", circle),
            ("pub use a::A; pub(crate) use b::B as C;", "use crate::C;", "use super::A;", circle),
            ("", "pub mod inner { use super::super::b::B; }", "use crate::a::inner::*;", circle),
            // One way only, or only in words, or only in tests.
            ("", "use crate::b::B;", "", none),
            ("", "use crate::b::B;", "//! [`crate::a`]\n/* crate::a */ const TEXT: &str = \"crate::a\\\"::a\";", none),
            ("", "use crate::b::B;", "const TEXT: &str = r#\"crate::a \" crate::a\"#; const C: char = '\"';", none),
            ("", "use crate::b::B;", "#[cfg(test)]\nmod tests { use crate::a::A; }", none),
            ("", "use crate::b::B;", "#[cfg(all(test, unix))]\nuse crate::a::A;", none),
            // What the root itself defines, and another crate of the same name.
            ("pub struct Root; use a::A;", "use crate::{Root, b::B};", "use crate::Root; use ::a::A; use a::A;", none),
        ] {
            let lib = format!("mod a;\nmod b;\n{lib}");
            assert_eq!(found(&[("lib.rs", &lib), ("a.rs", a), ("b.rs", b)]), expected, "{lib} | {a} | {b}");
        }
    }

    #[test]
    fn a_folder_imports_what_its_files_import() {
        let files = [
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a/mod.rs", "mod deep; pub struct A;"),
            ("a/deep.rs", "use super::A;\nuse crate::b::B;"),
            ("b.rs", "use crate::c::C;"),
            ("c/mod.rs", "mod one; mod two;"),
            ("c/one.rs", "use super::two::Two;"),
            ("c/two.rs", "\nuse crate::c::one::One; use crate::a::deep::D;"),
        ];
        let expected = [
            "a -> b (a/deep.rs:2) -> c (b.rs:1) -> a (c/two.rs:2)",
            "in c: one -> two (c/one.rs:1) -> one (c/two.rs:2)",
        ];
        assert_eq!(found(&files), expected);
    }

    #[test]
    fn a_module_for_tests_is_not_read() {
        let files = [
            ("main.rs", "mod a; mod b; #[cfg(test)] mod c;"),
            ("a.rs", "use crate::b::B;"),
            ("b.rs", ""),
            ("c.rs", "!"),
        ];
        assert_eq!(found(&files), [""; 0]);
    }

    #[test]
    fn this_crate_has_no_circle() {
        assert_eq!(circles(concat!(env!("CARGO_MANIFEST_DIR"), "/src")), [""; 0]);
    }
}
