//! Compiled kernels on disk, shared by processes.
//!
//! An entry is a file named after its key: magic, length, checksum, then the compiled kernel. It is
//! written under a temporary name and renamed, so a reader sees a whole entry or none. An entry
//! with a wrong checksum counts as absent. Nothing here fails: without a writable folder, each
//! process compiles its kernels.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

const MAGIC: &[u8; 8] = b"NVFP4CU1";
const HEADER: usize = MAGIC.len() + 8 + 16;

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub(super) struct DiskCache {
    folder: Option<PathBuf>,
}

/// What a compiled kernel depends on, hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(u128);

impl Key {
    /// The key of everything in `ingredients`, whose order counts.
    pub fn new(ingredients: &[&str]) -> Self {
        // Each length goes first, so that moving text from one ingredient to the next changes the
        // key.
        let hash = ingredients
            .iter()
            .fold(FNV_OFFSET, |hash, text| fnv1a(fnv1a(hash, &(text.len() as u64).to_le_bytes()), text.as_bytes()));
        Key(hash)
    }
}

impl DiskCache {
    /// The cache in `folder`, which need not exist; `None` keeps nothing.
    pub fn new(folder: Option<PathBuf>) -> Self {
        DiskCache { folder }
    }

    /// The entry of `key`, if there is a whole one.
    pub fn load(&self, key: Key) -> Option<Vec<u8>> {
        let mut file = fs::read(self.path(key)?).ok()?;
        let (magic, rest) = file.split_at_checked(MAGIC.len())?;
        let (length, rest) = rest.split_first_chunk::<8>()?;
        let (sum, image) = rest.split_first_chunk::<16>()?;
        let whole = magic == MAGIC
            && u64::from_le_bytes(*length) == image.len() as u64
            && u128::from_le_bytes(*sum) == checksum(key, image);
        whole.then(|| file.split_off(HEADER))
    }

    /// Keeps an entry if it can.
    pub fn store(&self, key: Key, image: &[u8]) {
        if let Some(path) = self.path(key) {
            let length = (image.len() as u64).to_le_bytes();
            // Not being able to write costs the next process a compilation, nothing else.
            let _ = write(&path, &[MAGIC, &length, &checksum(key, image).to_le_bytes(), image]);
        }
    }

    /// Where entries are kept.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Whether entries can be kept; tries it.
    pub fn is_writable(&self) -> bool {
        self.folder.as_ref().is_some_and(|folder| {
            let probe = folder.join("probe");
            write(&probe, &[]).and_then(|()| fs::remove_file(&probe)).is_ok()
        })
    }

    fn path(&self, key: Key) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(format!("{:032x}.cubin", key.0)))
    }
}

/// Writes `parts` to a temporary file, then renames it.
pub(crate) fn write(path: &Path, parts: &[&[u8]]) -> std::io::Result<()> {
    static WRITES: AtomicU64 = AtomicU64::new(0);
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let unique = format!("{}-{}.tmp", std::process::id(), WRITES.fetch_add(1, Ordering::Relaxed));
    let temporary = path.with_extension(unique);
    // Not `create_new`: a file that a dead process of the same id left behind is overwritten.
    let written = fs::File::create(&temporary)
        .and_then(|mut file| parts.iter().try_for_each(|part| file.write_all(part)))
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// The checksum of the contents and of the key, so that an entry under another's name is not
/// accepted.
fn checksum(key: Key, image: &[u8]) -> u128 {
    fnv1a(key.0, image)
}

/// A checksum of some bytes.
pub(crate) fn fingerprint(bytes: &[u8]) -> u128 {
    fnv1a(FNV_OFFSET, bytes)
}

const FNV_OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
const FNV_PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;

/// FNV-1a of 128 bits. The standard library's hash may change with its version; this one never
/// changes.
fn fnv1a(hash: u128, bytes: &[u8]) -> u128 {
    bytes.iter().fold(hash, |hash, &byte| (hash ^ u128::from(byte)).wrapping_mul(FNV_PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An empty folder that is removed again.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("nvfp4-cache-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&folder);
            Folder(folder)
        }

        fn cache(&self) -> DiskCache {
            DiskCache::new(Some(self.0.join("deep/er")))
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_hash_is_fnv1a() {
        assert_eq!(fnv1a(FNV_OFFSET, b""), FNV_OFFSET);
        assert_eq!(fnv1a(FNV_OFFSET, b"a"), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
        assert_eq!(fnv1a(FNV_OFFSET, b"foobar"), 0x343e_1662_793c_64bf_6f0d_3597_ba44_6f18);
    }

    #[test]
    fn what_is_kept_comes_back() {
        let folder = Folder::new("round-trip");
        let (cache, key) = (folder.cache(), Key::new(&["text"]));
        assert_eq!(cache.load(key), None);
        for image in [&b""[..], b"cubin", &[0xA5; 100_000]] {
            cache.store(key, image);
            assert_eq!(cache.load(key).as_deref(), Some(image));
            assert_eq!(cache.load(Key::new(&["other"])), None);
        }
        assert!(cache.is_writable());
        let files: Vec<_> = fs::read_dir(folder.0.join("deep/er")).unwrap().collect();
        assert_eq!(files.len(), 1, "no temporary file is left: {files:?}");
    }

    #[test]
    fn a_damaged_entry_is_absent_until_it_is_written_again() {
        let folder = Folder::new("damage");
        let (cache, key) = (folder.cache(), Key::new(&["text"]));
        cache.store(key, b"a compiled kernel");
        let path = cache.path(key).unwrap();
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x40;
            fs::write(&path, &damaged).unwrap();
            assert_eq!(cache.load(key), None, "byte {at} flipped");
            fs::write(&path, &whole[..at]).unwrap();
            assert_eq!(cache.load(key), None, "cut after {at} bytes");
        }
        fs::write(&path, [&whole[..], b"!"].concat()).unwrap();
        assert_eq!(cache.load(key), None, "a byte too long");
        let other = Key::new(&["other"]);
        fs::write(cache.path(other).unwrap(), &whole).unwrap();
        assert_eq!(cache.load(other), None, "under another's name");
        cache.store(key, b"a compiled kernel");
        assert_eq!(cache.load(key).as_deref(), Some(&b"a compiled kernel"[..]));
    }

    #[test]
    fn readers_among_many_writers_see_whole_entries() {
        let folder = Folder::new("writers");
        let (cache, key) = (folder.cache(), Key::new(&["text"]));
        let image = |seed: u8| vec![seed; 10_000 + usize::from(seed) * 1000];
        cache.store(key, &image(0));
        std::thread::scope(|scope| {
            for seed in 0..8 {
                let (cache, image) = (&cache, &image);
                scope.spawn(move || {
                    for _ in 0..20 {
                        cache.store(key, &image(seed));
                        let seen = cache.load(key).expect("an entry is always there");
                        assert_eq!(seen, image(seen[0]));
                    }
                });
            }
        });
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_no_error() {
        let folder = Folder::new("unwritable");
        fs::create_dir_all(&folder.0).unwrap();
        // A file where the folder should be: refused to every user, the superuser too.
        let file = folder.0.join("file");
        fs::write(&file, b"").unwrap();
        for cache in [DiskCache::new(Some(file.join("cache"))), DiskCache::new(Some(file)), DiskCache::new(None)] {
            let key = Key::new(&["text"]);
            cache.store(key, b"image");
            assert_eq!(cache.load(key), None);
            assert!(!cache.is_writable());
        }
    }

    #[test]
    fn each_ingredient_and_each_boundary_changes_the_key() {
        let ingredients = ["text", "--fmad=false", "sm_90a", "13.0", "12.8"];
        let key = Key::new(&ingredients);
        for i in 0..ingredients.len() {
            let mut changed = ingredients;
            changed[i] = "another";
            assert_ne!(Key::new(&changed), key);
        }
        assert_ne!(Key::new(&["ab", "c"]), Key::new(&["a", "bc"]));
        assert_ne!(Key::new(&["ab"]), Key::new(&["ab", ""]));
    }
}
