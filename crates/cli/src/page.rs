//! Pages that commands write with `--report`: one file, no scripts, nothing from the network, light
//! and dark, wide and narrow.

use anyhow::{Context, Result, ensure};
use maud::{DOCTYPE, Markup, PreEscaped, html};
use nvfp4_files::durable;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

const STYLE: &str = "
:root { color-scheme: light dark; --text: #1d2330; --soft: #667085; --line: #d9dde5; --back: #ffffff; --bar: #4c78d8 }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ef; --soft: #98a2b3; --line: #333a47; --back: #14171d; --bar: #7aa2ff } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 60rem; margin: 0 auto; padding: 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums }
td, th { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid var(--line) }
td:first-child, th:first-child { text-align: left; min-width: 7rem } td { overflow-wrap: anywhere }
.wide { overflow-x: auto } svg { width: 100%; height: auto } svg text { fill: var(--soft); font: 12px system-ui, sans-serif }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; list-style: none; padding: 0; font-size: .9rem }
.legend span { display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem }
.axis { stroke: var(--line) } .reference { stroke: var(--soft); stroke-dasharray: 4 4 } .bar { fill: var(--bar) } p, li { color: var(--text); overflow-wrap: anywhere } .soft { color: var(--soft) }
@media (max-width: 40rem) {
  svg text { font-size: 24px } .spare { display: none }
  .cards th { display: none } .cards tr { display: block; padding: .4rem 0; border-bottom: 1px solid var(--line) }
  .cards td { display: flex; justify-content: space-between; padding: .1rem 0; border: 0 }
  .cards td::before { content: attr(data-name); color: var(--soft) } .cards td:first-child { display: block; text-align: left; font-weight: 600 }
}";

/// Marks a page as one of these.
const MARK: &str = "<meta name=\"generator\" content=\"nvfp4\">";

/// What a page may take the place of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Replaces {
    /// An earlier page.
    Pages,
    /// Any file.
    Files,
}

/// An error if a page cannot be written, before there is anything to write. It may not be in any of
/// the folders, or be any of the files, in `apart`.
pub fn check(path: &Path, replaces: Replaces, apart: &[(&str, &Path)]) -> Result<()> {
    let folder = durable::parent(path);
    ensure!(folder.is_dir(), "--report {}: there is no folder {}", path.display(), folder.display());
    ensure!(!path.is_dir(), "--report {}: this is a folder; name a file in it", path.display());
    ensure!(path.is_file() || !path.exists(), "--report {}: this is not a file; name one", path.display());
    // A link counts both where it is and where it leads.
    let places = |path: &Path| -> Vec<PathBuf> {
        let here =
            durable::parent(path).canonicalize().ok().zip(path.file_name()).map(|(parent, name)| parent.join(name));
        here.into_iter().chain(path.canonicalize().ok()).collect()
    };
    let page = places(path);
    for (name, other) in apart {
        let inside = places(other).iter().any(|other| page.iter().any(|page| page.starts_with(other)));
        ensure!(!inside, "--report {}: this is in the {name}; name a file elsewhere", path.display());
    }
    ensure!(
        replaces == Replaces::Files || path.symlink_metadata().is_err() || is_page(path),
        "--report {}: there is a file that is not a report; name another",
        path.display()
    );
    Ok(())
}

/// The files of a folder, and the links to files, at any depth.
pub fn files(folder: &Path) -> Vec<PathBuf> {
    let (mut files, mut open) = (Vec::new(), vec![folder.to_path_buf()]);
    while let Some(folder) = open.pop() {
        for path in fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
            match path.is_dir() {
                true if path.is_symlink() => {}
                true => open.push(path),
                false => files.push(path),
            }
        }
    }
    files
}

/// Whether a file is a page.
fn is_page(path: &Path) -> bool {
    let mut start = Vec::new();
    fs::metadata(path).is_ok_and(|metadata| metadata.is_file())
        && File::open(path).and_then(|file| file.take(1024).read_to_end(&mut start)).is_ok()
        && String::from_utf8_lossy(&start).contains(MARK)
}

/// Writes a page.
pub fn write(path: &Path, page: &str) -> Result<()> {
    durable::write(path, page.as_bytes()).with_context(|| format!("--report {}", path.display()))
}

/// A whole page: a title, an introduction, and sections by name.
pub fn page(title: &str, introduction: &str, sections: &[(&str, Markup)]) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                (PreEscaped(MARK))
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { (title) }
                p { (introduction) }
                @for (name, content) in sections {
                    section {
                        h2 { (name) }
                        div class="wide" { (content) }
                    }
                }
            }
        }
    };
    page.into_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_from_a_checkpoint_cannot_become_markup() {
        let page = page("<script>", "a & b", &[("<h2>", html! { p { "\"<i>" } })]);
        assert!(page.contains("<title>&lt;script&gt;</title>") && page.contains("<p>a &amp; b</p>"), "{page}");
        assert!(page.contains("<h2>&lt;h2&gt;</h2>") && page.contains("<p>&quot;&lt;i&gt;</p>"), "{page}");
    }

    #[test]
    fn a_page_is_known_by_its_mark() {
        assert!(page("", "", &[])[..1024].contains(MARK));
    }
}
