//! Interleaved timing of several kinds of work.

use super::error::Error;
use super::stream::{Event, Graph, Stream};
use nvfp4_spec::philox::{philox4x32, words};
use std::result::Result;

/// Microseconds of each kind of work in each of `rounds` rounds.
///
/// `record` queues one kind of work; all memory that it uses is in `memory`. It is called twice for
/// each kind: once so that its kernels are loaded, once to capture a graph. Each round launches
/// every graph once, so that changes of the chip's clock affect all of them alike; a first round
/// does not count. Each round has another order: work that always followed hotter work would always
/// run at a lower clock. Everything is queued before anything is waited for, so the GPU waits for
/// the CPU only where a graph takes less time than its launch.
///
/// All work has finished when this returns.
pub fn time_interleaved<M, W: Copy, E: From<Error>>(
    stream: &Stream,
    memory: &mut M,
    works: &[W],
    rounds: usize,
    record: fn(&mut M, &Stream, W) -> Result<(), E>,
) -> Result<Vec<Vec<f32>>, E> {
    works.iter().try_for_each(|&work| record(memory, stream, work))?;
    stream.synchronize()?;
    let graphs = works.iter().map(|&work| stream.capture(|stream| record(memory, stream, work)));
    let graphs = graphs.collect::<Result<Vec<Graph>, E>>()?;
    let mark = || {
        let event = Event::new(stream.device())?;
        event.record(stream).map(|()| event)
    };
    // The order of a round, with a mark before each graph and one after the last.
    let round = |round: usize| -> Result<(Vec<usize>, Vec<Event>), Error> {
        let (order, mut marks) = (order(graphs.len(), round), vec![mark()?]);
        for &i in &order {
            // SAFETY: this function has borrowed the recorded memory, and waits for all work before
            // it returns or drops a graph; during the capture the driver refused to free memory.
            unsafe { graphs[i].launch(stream) }?;
            marks.push(mark()?);
        }
        Ok((order, marks))
    };
    let queued = (0..=rounds).map(round).collect::<Result<Vec<_>, Error>>();
    // Also after an error: what was queued must finish before graphs are dropped and the borrow
    // ends.
    stream.synchronize()?;
    let (queued, mut times) = (queued?, vec![Vec::with_capacity(rounds); works.len()]);
    for (order, marks) in &queued[1..] {
        for (&i, pair) in order.iter().zip(marks.windows(2)) {
            times[i].push(pair[1].elapsed_us(&pair[0])?);
        }
    }
    Ok(times)
}

/// The numbers below `len` in the order of a round.
fn order(len: usize, round: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..len).collect();
    order.sort_by_key(|&i| philox4x32([i as u32, 0, 0, 0], words(round as u64)));
    order
}
