//! Every section of `docs/numerics.md` that the workspace's code cites is there.

use std::collections::BTreeSet;
use std::fs::{read_dir, read_to_string};
use std::path::{Path, PathBuf};

fn rust_files(dir: &Path) -> Vec<PathBuf> {
    let paths = read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    paths.flat_map(|path| if path.is_dir() { rust_files(&path) } else { vec![path] }).collect()
}

/// The numbers after each "§", without a closing full stop.
fn cited(text: &str) -> impl Iterator<Item = String> {
    let number = |rest: &str| rest.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect::<String>();
    text.split('§').skip(1).map(number).map(|n| n.trim_end_matches('.').to_string()).filter(|n| !n.is_empty())
}

#[test]
fn every_cited_section_of_the_numerics_exists() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let numerics = read_to_string(crates.join("../docs/numerics.md")).unwrap();
    let heading =
        |line: &str| line.strip_prefix("##")?.trim_start_matches('#').split_whitespace().next().map(String::from);
    let sections: BTreeSet<String> =
        numerics.lines().filter_map(heading).map(|n| n.trim_end_matches('.').to_string()).collect();
    let mut citations = 0;
    for path in rust_files(&crates).iter().filter(|path| path.extension().is_some_and(|e| e == "rs")) {
        for section in cited(&read_to_string(path).unwrap()) {
            assert!(sections.contains(&section), "{} cites numerics §{section}", path.display());
            citations += 1;
        }
    }
    assert!(citations > 20, "found only {citations} citations");
}
