//! Costs that were measured, in a file beside the compiled kernels.
//!
//! The file is text: what it is and its version, the GPU, a cost per line, and a checksum. It is
//! written whole or not at all. One that is damaged, or of another version, GPU or list of shapes,
//! counts as absent.

use super::costs::Costs;
use super::shape::Chip;
use crate::cuda::{Device, fingerprint, lock, write_whole};
use std::collections::HashMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::{fs, io};

/// What a file is, before its version.
const TITLE: &str = "nvfp4 costs";
/// Grows when a cost gets another meaning.
const VERSION: u32 = 1;

/// What the file of a GPU's costs holds.
#[derive(Clone, Debug, PartialEq)]
pub enum Kept {
    /// There is no file.
    Nothing,
    /// Costs that were measured.
    Tuned(PathBuf, Costs),
    /// Nothing that can be used, and why.
    Ignored(PathBuf, String),
}

impl Costs {
    /// The costs in use on a GPU: those that were kept for it, else those that ship. They are read
    /// once per process.
    pub fn of(device: Device) -> &'static Costs {
        static OPEN: Mutex<Option<HashMap<usize, &'static Costs>>> = Mutex::new(None);
        let mut open = lock(&OPEN);
        open.get_or_insert_default().entry(device.ordinal()).or_insert_with(|| match Costs::kept(device) {
            Kept::Tuned(_, costs) => Box::leak(Box::new(costs)),
            Kept::Nothing | Kept::Ignored(..) => Costs::shipped(device),
        })
    }

    /// What is kept for a GPU now.
    pub fn kept(device: Device) -> Kept {
        Costs::file(device).map_or(Kept::Nothing, |path| read(&path, &Chip::of(device), &Gpu::of(device)))
    }

    /// The file in which costs of a GPU are kept; `None` if the environment names no folder for the
    /// cache.
    pub fn file(device: Device) -> Option<PathBuf> {
        Some(device.cache_folder()?.join(Gpu::of(device).file_name()))
    }

    /// Keeps these costs for a GPU, for processes that start from now on. Returns the file.
    pub fn keep(&self, device: Device) -> io::Result<PathBuf> {
        let path = Costs::file(device).ok_or_else(no_folder)?;
        write_whole(&path, &[text(self, &Chip::of(device), &Gpu::of(device)).as_bytes()])?;
        Ok(path)
    }

    /// Removes what was kept for a GPU. Returns the file, if there was one.
    pub fn forget(device: Device) -> io::Result<Option<PathBuf>> {
        let path = Costs::file(device).ok_or_else(no_folder)?;
        match fs::remove_file(&path) {
            Ok(()) => Ok(Some(path)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn no_folder() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "there is no folder for the cache: set NVFP4_CACHE_DIR to one")
}

/// What costs belong to.
struct Gpu {
    name: String,
    capability: (u32, u32),
    portable: bool,
}

impl Gpu {
    fn of(device: Device) -> Self {
        Gpu { name: device.name().to_string(), capability: device.capability(), portable: device.portable() }
    }

    /// What a file says of it.
    fn lines(&self) -> String {
        let (major, minor) = self.capability;
        let kernels = if self.portable { "portable" } else { "its own" };
        format!("gpu = {}\ncapability = {major}.{minor}\nkernels = {kernels}\n", self.name)
    }

    fn file_name(&self) -> String {
        let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
        let (name, (major, minor)) = (self.name.chars().map(plain).collect::<String>(), self.capability);
        format!("costs-{name}-{major}.{minor}{}.txt", if self.portable { "-portable" } else { "" })
    }
}

fn title() -> String {
    format!("{TITLE} {VERSION}\n")
}

fn text(costs: &Costs, chip: &Chip, gpu: &Gpu) -> String {
    let mut text = title() + &gpu.lines();
    for cost in costs.list_for(chip) {
        writeln!(text, "{} = {}", cost.name, cost.value).expect("a string takes all");
    }
    let sum = fingerprint(text.as_bytes());
    text + &format!("checksum = {sum:032x}\n")
}

fn read(path: &Path, chip: &Chip, gpu: &Gpu) -> Kept {
    let costs = match fs::read_to_string(path) {
        Ok(text) => parse(&text, chip, gpu),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Kept::Nothing,
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Err("it is damaged".to_string()),
        Err(error) => Err(format!("it cannot be read: {error}")),
    };
    match costs {
        Ok(costs) => Kept::Tuned(path.to_path_buf(), costs),
        Err(reason) => Kept::Ignored(path.to_path_buf(), reason),
    }
}

/// The costs of a file, or why it cannot be used.
fn parse(file: &str, chip: &Chip, gpu: &Gpu) -> Result<Costs, String> {
    let damaged = || "it is damaged".to_string();
    let other_version = || "another version of nvfp4 wrote it".to_string();
    let body = file.strip_prefix(&title()).ok_or_else(|| match file.starts_with(TITLE) {
        true => other_version(),
        false => damaged(),
    })?;
    let (before, sum) = file.rsplit_once("checksum = ").ok_or_else(damaged)?;
    if sum != format!("{:032x}\n", fingerprint(before.as_bytes())) {
        return Err(damaged());
    }
    let costs = body.strip_prefix(&gpu.lines()).ok_or("it is of another GPU")?;
    let lines = costs.lines().take_while(|line| !line.starts_with("checksum = "));
    let list = lines.map(|line| {
        let (name, value) = line.rsplit_once(" = ")?;
        Some((name, value.parse().ok()?))
    });
    let list: Vec<(&str, f64)> = list.collect::<Option<_>>().ok_or_else(damaged)?;
    let costs = Costs::of_list(chip, &list).ok_or_else(other_version)?;
    costs.is_plausible().then_some(costs).ok_or_else(damaged)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHIP: Chip = Chip { wgmma: true, clusters: true, multiprocessors: 132, shared_memory: 232448 };

    fn h200() -> Gpu {
        Gpu { name: "NVIDIA H200".to_string(), capability: (9, 0), portable: false }
    }

    /// Costs that did not ship, with values that take all digits.
    fn measured() -> Costs {
        let mut costs = Costs::shipped_for(&CHIP).clone();
        costs.steps.to_mut()[1] = 100.0 / 3.0;
        costs
    }

    #[test]
    fn a_file_is_read_as_it_was_written() {
        let (costs, written) = (measured(), text(&measured(), &CHIP, &h200()));
        assert_eq!(parse(&written, &CHIP, &h200()), Ok(costs));
        let start = "nvfp4 costs 1\ngpu = NVIDIA H200\ncapability = 9.0\nkernels = its own\n\
                     step mma.sync 8×64×128, 12 stages, 4 slices = 82\n";
        assert!(written.starts_with(start), "{written}");
        assert_eq!(h200().file_name(), "costs-NVIDIA-H200-9.0.txt");
    }

    #[test]
    fn what_is_damaged_or_of_something_else_is_ignored() {
        let whole = text(&measured(), &CHIP, &h200());
        let lines: Vec<&str> = whole.lines().collect();
        for end in 0..lines.len() {
            assert!(parse(&lines[..end].join("\n"), &CHIP, &h200()).is_err(), "cut after {end} lines");
        }
        for at in (0..whole.len()).filter(|&at| whole.as_bytes()[at].is_ascii()) {
            let mut damaged = whole.clone().into_bytes();
            damaged[at] ^= 1;
            let damaged = String::from_utf8(damaged).unwrap();
            assert!(parse(&damaged, &CHIP, &h200()).is_err(), "byte {at} flipped: {damaged}");
        }
        let newer = whole.replace("costs 1", "costs 2");
        let other = Gpu { capability: (10, 0), ..h200() };
        let portable = Chip { wgmma: false, ..CHIP };
        let mut impossible = measured();
        impossible.split = -1.0;
        for (file, chip, gpu, reason) in [
            (&newer, &CHIP, &h200(), "another version of nvfp4 wrote it"),
            (&whole, &CHIP, &other, "it is of another GPU"),
            (&whole, &portable, &h200(), "another version of nvfp4 wrote it"),
            (&text(&impossible, &CHIP, &h200()), &CHIP, &h200(), "it is damaged"),
            (&String::new(), &CHIP, &h200(), "it is damaged"),
        ] {
            assert_eq!(parse(file, chip, gpu), Err(reason.to_string()));
        }
    }

    #[test]
    fn a_file_is_there_whole_or_not_at_all() {
        let folder = std::env::temp_dir().join(format!("nvfp4-costs-{}", std::process::id()));
        let path = folder.join(h200().file_name());
        assert_eq!(read(&path, &CHIP, &h200()), Kept::Nothing);
        write_whole(&path, &[text(&measured(), &CHIP, &h200()).as_bytes()]).unwrap();
        assert_eq!(read(&path, &CHIP, &h200()), Kept::Tuned(path.clone(), measured()));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "no temporary file is left");
        fs::write(&path, [0xFF, 0xFE]).unwrap();
        assert_eq!(read(&path, &CHIP, &h200()), Kept::Ignored(path, "it is damaged".to_string()));
        fs::remove_dir_all(&folder).unwrap();
    }
}
