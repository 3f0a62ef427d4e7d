//! Files and folders that are whole whenever they have their name, even if the machine stops while they are written.
//!
//! A file is written under another name in the same folder, put on the disk, and then renamed. A folder that replaces
//! another is made beside it; the other moves aside, and is removed when the new one has its name.

use crate::positioned;
use crate::{Error, Result};
use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Writes a file, which is replaced if it exists.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    write_with(path, |part| fs::write(part, bytes).map_err(|e| Error::io(path, e)))
}

/// Writes a file by a function that is given another name to write to. A link stays a link, and permissions stay what they are; a new
/// file has the ordinary ones.
pub fn write_with<E: From<Error>>(
    path: &Path,
    content: impl FnOnce(&Path) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let new = || Some(parent(path).canonicalize().ok()?.join(path.file_name()?));
    let last = path.canonicalize().ok().or_else(new).unwrap_or_else(|| path.to_path_buf());
    // Several threads and programs may write the same file; the last one stays.
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let part = beside(&last, &format!(".{}-{count}.part", std::process::id()));
    let written = fill(path, &last, &part, content);
    if written.is_err() {
        let _ = fs::remove_file(&part); // the error is about what came before
    }
    written
}

/// `path` is what errors call the file.
fn fill<E: From<Error>>(
    path: &Path,
    last: &Path,
    part: &Path,
    content: impl FnOnce(&Path) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    let io = |e| Error::io(path, e);
    let permissions = match fs::metadata(last) {
        Ok(metadata) if !metadata.is_file() => {
            return Err(Error::content(path, "this is not a file; name one").into());
        }
        Ok(metadata) => Some(metadata.permissions()),
        Err(_) => None,
    };
    // Nothing that had the name stays, least of all a link. A new file's permissions are those of one that is made as any
    // other: `content` may make its own, which others cannot read.
    let _ = fs::remove_file(part); // mostly there is none; what cannot be removed is refused below
    let ordinary = File::create_new(part).and_then(|file| file.metadata()).map_err(io)?.permissions();
    content(part)?;
    fs::set_permissions(part, permissions.unwrap_or(ordinary)).map_err(io)?;
    File::options().write(true).open(part).and_then(|file| file.sync_all()).map_err(io)?;
    let disk = Disk::default();
    disk.rename(part, last)?;
    Ok(disk.sync_folder(parent(last))?)
}

/// A path of the same name with an ending.
pub fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name: OsString = path.file_name().unwrap_or_default().to_os_string();
    name.push(ending);
    path.with_file_name(name)
}

/// Where a folder moves that is replaced: a name that nobody has.
pub fn aside(folder: &Path) -> PathBuf {
    let names = (1usize..).map(|n| beside(folder, &format!(".replaced-{n}")));
    names.into_iter().find(|name| name.symlink_metadata().is_err()).expect("names do not run out")
}

/// The folder that something lies in.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Everything that changes a disk.
#[derive(Clone, Debug, Default)]
pub struct Disk {
    /// How many operations still succeed; `None` for all.
    left: Option<std::sync::Arc<AtomicUsize>>,
}

impl Disk {
    /// A disk that stops after this many operations, as if the machine were switched off. Tests use it.
    pub fn stops_after(operations: usize) -> Self {
        Disk { left: Some(std::sync::Arc::new(operations.into())) }
    }

    /// Comes before each operation.
    fn operate(&self) -> io::Result<()> {
        if let Some(left) = &self.left
            && left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_err()
        {
            return Err(io::Error::other("the machine was switched off"));
        }
        Ok(())
    }

    /// A file of this length under a temporary name. What has that name is removed first: a file that was not finished, or a link,
    /// which must not lead to what is written.
    pub fn create(&self, last: &Path, len: u64) -> Result<Part> {
        let part = beside(last, ".part");
        self.create_folder(parent(last))?;
        if part.symlink_metadata().is_ok() {
            self.remove_file(&part)?;
        }
        let open = || File::options().read(true).write(true).create_new(true).open(&part);
        let file = self.operate().and_then(|()| open()).map_err(|e| Error::io(&part, e))?;
        self.operate().and_then(|()| file.set_len(len)).map_err(|e| Error::io(&part, e))?;
        Ok(Part { disk: self.clone(), file, part, last: last.to_path_buf(), action: Action::Write })
    }

    /// A file that is there already, and is compared with what would be written.
    pub fn compare(&self, last: &Path, len: u64) -> Result<Part> {
        let file = File::open(last).map_err(|e| Error::io(last, e))?;
        let found = file.metadata().map_err(|e| Error::io(last, e))?.len();
        let (disk, part, last) = (self.clone(), last.to_path_buf(), last.to_path_buf());
        let part = Part { disk, file, part, last, action: Action::Compare };
        if found == len { Ok(part) } else { Err(part.differs()) }
    }

    /// Makes a folder, and those that it lies in.
    pub fn create_folder(&self, folder: &Path) -> Result<()> {
        if folder.is_dir() {
            return Ok(());
        }
        self.operate().and_then(|()| fs::create_dir_all(folder)).map_err(|e| Error::io(folder, e))
    }

    /// Renames a file or a folder; a file takes the place of another.
    pub fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.operate().and_then(|()| fs::rename(from, to)).map_err(|e| {
            let reason = format!("cannot be renamed to {}: {e}", to.display());
            Error::io(from, io::Error::new(e.kind(), reason))
        })
    }

    /// Gives a folder the name of another, which moves to `old` if there is one.
    pub fn exchange(&self, new: &Path, target: &Path, old: &Path) -> Result<()> {
        let replaces = target.symlink_metadata().is_ok();
        if replaces {
            self.rename(target, old)?;
        }
        if let Err(error) = self.rename(new, target) {
            if replaces {
                self.rename(old, target)?;
            }
            return Err(error);
        }
        self.sync_folder(parent(target))
    }

    /// Removes a file.
    pub fn remove_file(&self, path: &Path) -> Result<()> {
        self.operate().and_then(|()| fs::remove_file(path)).map_err(|e| Error::io(path, e))
    }

    /// Removes a folder and what is in it.
    pub fn remove_folder(&self, folder: &Path) -> Result<()> {
        self.operate().and_then(|()| fs::remove_dir_all(folder)).map_err(|e| Error::io(folder, e))
    }

    /// Removes a folder in which there is nothing.
    pub fn remove_empty(&self, folder: &Path) -> Result<()> {
        self.operate().and_then(|()| fs::remove_dir(folder)).map_err(|e| Error::io(folder, e))
    }

    /// Puts the names in a folder on the disk.
    pub fn sync_folder(&self, folder: &Path) -> Result<()> {
        // Only Unix can open a folder; elsewhere a rename is as durable as the system makes it.
        if cfg!(unix) {
            let sync = || File::open(folder).and_then(|f| f.sync_all());
            self.operate().and_then(|()| sync()).map_err(|e| Error::io(folder, e))?;
        }
        Ok(())
    }

    /// A lock that ends with the process; `None` where another process has it.
    pub fn lock(&self, path: &Path) -> Result<Option<File>> {
        let open = || File::options().write(true).create(true).truncate(false).open(path);
        let file = self.operate().and_then(|()| open()).map_err(|e| Error::io(path, e))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            // A file system without locks: nothing says that another process is there.
            Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Unsupported => Ok(Some(file)),
            Err(TryLockError::Error(e)) => Err(Error::io(path, e)),
        }
    }
}

/// What happens to the bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Write,
    Compare,
}

/// A file under its temporary name; or one that is there, and compared.
#[derive(Debug)]
pub struct Part {
    disk: Disk,
    file: File,
    part: PathBuf,
    last: PathBuf,
    action: Action,
}

impl Part {
    /// Writes bytes at an offset; several threads may.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        if self.action == Action::Compare {
            let mut found = vec![0; bytes.len()];
            positioned::read_exact(&self.file, &mut found, offset).map_err(|e| Error::io(&self.last, e))?;
            return if found == bytes { Ok(()) } else { Err(self.differs()) };
        }
        let write = || positioned::write_all(&self.file, bytes, offset);
        self.disk.operate().and_then(|()| write()).map_err(|e| Error::io(&self.part, e))
    }

    /// Puts on the disk what was written so far. Others may write meanwhile.
    pub fn flush(&self) -> Result<()> {
        match self.action {
            Action::Write => self.file.sync_data().map_err(|e| Error::io(&self.part, e)),
            Action::Compare => Ok(()),
        }
    }

    fn differs(&self) -> Error {
        Error::Differs { path: self.last.clone() }
    }

    /// Writes all of another file.
    pub fn copy(&mut self, from: &mut File) -> Result<()> {
        let copied = self.disk.operate().and_then(|()| io::copy(from, &mut self.file));
        copied.map(drop).map_err(|e| Error::io(&self.part, e))
    }

    /// Puts it on the disk and gives it its name.
    pub fn finish(self) -> Result<()> {
        if self.action == Action::Compare {
            return Ok(());
        }
        self.disk.operate().and_then(|()| self.file.sync_all()).map_err(|e| Error::io(&self.part, e))?;
        drop(self.file);
        self.disk.rename(&self.part, &self.last)?;
        self.disk.sync_folder(parent(&self.last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("nvfp4-durable-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Folder(path)
        }

        fn names(&self) -> Vec<String> {
            let names = fs::read_dir(&self.0).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<String> = names.collect();
            names.sort();
            names
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_file_that_cannot_be_written_leaves_the_one_before() {
        let dir = Folder::new("before");
        let path = dir.0.join("a");
        write(&path, b"before").unwrap();
        let half = |part: &Path| {
            fs::write(part, b"aft").unwrap();
            Err(Error::content(part, "no more"))
        };
        assert!(write_with(&path, half).unwrap_err().to_string().ends_with("no more"));
        assert_eq!((fs::read(&path).unwrap(), dir.names()), (b"before".to_vec(), vec!["a".to_string()]));
        write(&path, b"after").unwrap();
        assert_eq!((fs::read(&path).unwrap(), dir.names()), (b"after".to_vec(), vec!["a".to_string()]));
        let folder = write(&dir.0, b"").unwrap_err().to_string();
        assert!(folder.ends_with("this is not a file; name one"), "{folder}");
    }

    #[cfg(unix)]
    #[test]
    fn permissions_are_those_of_any_file_and_links_stay() {
        use std::os::unix::fs::PermissionsExt;
        let dir = Folder::new("permissions");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        let (path, ordinary, link) = (dir.0.join("a"), dir.0.join("ordinary"), dir.0.join("link"));
        fs::write(&ordinary, b"").unwrap();
        let private = |part: &Path| {
            fs::write(part, b"1").and_then(|()| fs::set_permissions(part, fs::Permissions::from_mode(0o600))).unwrap();
            Ok::<(), Error>(())
        };
        write_with(&path, private).unwrap();
        assert_eq!(mode(&path), mode(&ordinary));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink("a", &link).unwrap();
        write(&link, b"2").unwrap();
        assert!(link.is_symlink());
        assert_eq!((fs::read(&path).unwrap(), mode(&path) & 0o777), (b"2".to_vec(), 0o640));
    }

    /// Links that somebody put where parts are written: what they lead to keeps its bytes, or is not made.
    #[cfg(unix)]
    #[test]
    fn a_part_is_never_written_through_a_link() {
        let dir = Folder::new("part");
        let (last, part, kept) = (dir.0.join("a"), dir.0.join("a.part"), dir.0.join("kept"));
        fs::write(&kept, b"mine").unwrap();
        for to in ["kept", "absent"] {
            std::os::unix::fs::symlink(to, &part).unwrap();
            let file = Disk::default().create(&last, 3).unwrap();
            file.write_at(b"new", 0).unwrap();
            file.finish().unwrap();
            assert_eq!((fs::read(&last).unwrap(), last.is_symlink()), (b"new".to_vec(), false), "{to}");
            assert_eq!((fs::read(&kept).unwrap(), dir.0.join("absent").exists()), (b"mine".to_vec(), false), "{to}");
        }
    }

    #[test]
    fn a_rename_that_fails_names_both_paths_and_puts_back_what_moved() {
        let dir = Folder::new("rename");
        let (new, target, old) = (dir.0.join("new"), dir.0.join("target"), dir.0.join("target.replaced-1"));
        fs::create_dir(&target).unwrap();
        fs::write(target.join("kept"), b"").unwrap();
        assert_eq!(aside(&target), old);
        let said = Disk::default().exchange(&new, &target, &old).unwrap_err().to_string();
        assert!(said.contains(&format!("{}: cannot be renamed to {}", new.display(), target.display())), "{said}");
        assert!(target.join("kept").exists());
    }
}
