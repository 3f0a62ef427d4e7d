//! Work timed beside other work.

use super::error::Error;
use super::stream::{Event, Graph, Stream};
use nvfp4_spec::philox::{philox4x32, words};
use std::result::Result;

/// Microseconds of pieces of work, as many of each as there are `turns`.
///
/// `record` is told which piece of work to give to the stream; all memory that it uses is in `memory`. It is called once for each piece
/// as it is, so that what it needs is loaded, then once to capture a graph; the graphs run in turns, so that what the chip's clocks do
/// happens to all of them alike, after one turn that does not count. Each turn has another order: a piece that follows one of more heat
/// would run at a lower clock every time. Everything is queued before anything is waited for: the GPU never waits for the CPU, but where
/// a graph takes less time than its start.
///
/// All work has ended when this returns.
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
    // The order of a turn, with a mark before each graph and one after the last.
    let round = |round: usize| -> Result<(Vec<usize>, Vec<Event>), Error> {
        let (order, mut marks) = (order(graphs.len(), round), vec![mark()?]);
        for &i in &order {
            // SAFETY: the recorded memory is lent to this function, which waits for the end of all work before it gives that back or
            // drops a graph; while work was recorded, the driver let nothing be freed.
            unsafe { graphs[i].launch(stream) }?;
            marks.push(mark()?);
        }
        Ok((order, marks))
    };
    let queued = (0..=rounds).map(round).collect::<Result<Vec<_>, Error>>();
    // Even where something could not be queued: what was must end before graphs are dropped and memory is given back.
    stream.synchronize()?;
    let (queued, mut times) = (queued?, vec![Vec::with_capacity(rounds); works.len()]);
    for (order, marks) in &queued[1..] {
        for (&i, pair) in order.iter().zip(marks.windows(2)) {
            times[i].push(pair[1].elapsed_us(&pair[0])?);
        }
    }
    Ok(times)
}

/// The numbers below `len` in an order of the turn's own.
fn order(len: usize, round: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..len).collect();
    order.sort_by_key(|&i| philox4x32([i as u32, 0, 0, 0], words(round as u64)));
    order
}
