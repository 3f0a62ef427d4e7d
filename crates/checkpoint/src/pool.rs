//! Tasks on a fixed number of threads, each with memory of its own that it reuses.
//!
//! Not rayon: while one of its tasks waits, it may begin another, and what is in memory would no
//! longer be bounded by the number of threads.

use crate::{Error, Result};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

/// Runs every task; they begin in order. The first error stops the rest, and so does
/// `stop`.
pub(super) fn run<T: Sync, M: Default>(
    threads: usize,
    tasks: &[T],
    stop: &AtomicBool,
    work: impl Fn(&T, &mut M) -> Result<()> + Sync,
) -> Result<()> {
    run_in(thread::Builder::new, threads, tasks, stop, work)
}

/// Runs what divides its work by itself on this many threads.
pub(super) fn divided<R: Send>(threads: usize, work: impl FnOnce() -> R + Send) -> Result<R> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(|error| refused(threads, &error))?;
    Ok(pool.install(work))
}

fn refused(threads: usize, error: &dyn std::error::Error) -> Error {
    Error::Refused(format!("cannot start {threads} threads: {error}; ask for fewer"))
}

/// [`run`] in threads that `builder` makes.
fn run_in<T: Sync, M: Default>(
    builder: impl Fn() -> thread::Builder,
    threads: usize,
    tasks: &[T],
    stop: &AtomicBool,
    work: impl Fn(&T, &mut M) -> Result<()> + Sync,
) -> Result<()> {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(None::<(usize, Error)>));
    if tasks.is_empty() {
        return outcome(failed, stop);
    }
    let halted = AtomicBool::new(false);
    let worker = || {
        let mut memory = M::default();
        while !stop.load(Ordering::Relaxed) && !halted.load(Ordering::Relaxed) {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(task) = tasks.get(i) else { break };
            if let Err(error) = work(task, &mut memory) {
                halted.store(true, Ordering::Relaxed);
                let mut failed = failed.lock().expect("no worker panics while it holds this");
                if failed.as_ref().is_none_or(|(first, _)| i < *first) {
                    *failed = Some((i, error));
                }
            }
        }
    };
    // Where kernels already run on one thread, one worker needs no thread of its own.
    if threads == 1 && rayon::current_num_threads() == 1 {
        worker();
        return outcome(failed, stop);
    }
    let alone = || match rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build() {
        // Kernels split their work over the pool that they are called in: here, this thread alone.
        Ok(alone) => alone.install(worker),
        Err(_) => worker(),
    };
    let count = threads.clamp(1, tasks.len());
    thread::scope(|scope| {
        let begun = (0..count).try_for_each(|_| builder().spawn_scoped(scope, alone).map(drop));
        begun.map_err(|error| {
            halted.store(true, Ordering::Relaxed);
            refused(count, &error)
        })
    })?;
    outcome(failed, stop)
}

/// The result of all tasks.
fn outcome(failed: Mutex<Option<(usize, Error)>>, stop: &AtomicBool) -> Result<()> {
    match failed.into_inner().expect("the workers are done") {
        Some((_, error)) => Err(error),
        None if stop.load(Ordering::Relaxed) => Err(Error::Interrupted),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_and_the_first_error_wins() {
        let seen: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
        let tasks: Vec<usize> = (0..100).collect();
        let stop = AtomicBool::new(false);
        run(3, &tasks, &stop, |&i, _: &mut ()| {
            seen[i].fetch_add(1, Ordering::Relaxed);
            Ok(())
        })
        .unwrap();
        assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == 1));
        let fail = |&i: &usize, _: &mut ()| if i >= 7 { Err(Error::Refused(i.to_string())) } else { Ok(()) };
        assert_eq!(run(1, &tasks, &stop, fail).unwrap_err().to_string(), "7");
        // Stacks that no memory has room for.
        let huge = || thread::Builder::new().stack_size(usize::MAX / 4);
        let refused = run_in(huge, 3, &tasks, &stop, |_, _: &mut ()| Ok(())).unwrap_err().to_string();
        assert!(refused.starts_with("cannot start 3 threads: "), "{refused}");
        stop.store(true, Ordering::Relaxed);
        assert!(matches!(run(2, &tasks, &stop, |_, _: &mut ()| Ok(())), Err(Error::Interrupted)));
    }
}
