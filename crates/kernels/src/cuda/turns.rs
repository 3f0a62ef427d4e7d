//! Work timed beside other work.

use super::error::Error;
use super::stream::{Event, Graph, Stream};
use std::result::Result;

/// Microseconds of pieces of work, as many of each as there are `turns`.
///
/// `record` is told which piece of work to give to the stream; all memory that it uses is in `memory`. It is called once for each piece
/// as it is, so that what it needs is loaded, then once to capture a graph; the graphs run in turns, so that what the chip's clocks do
/// happens to all of them alike, after one turn that does not count. Everything is queued before anything is waited for: the GPU never
/// waits for the CPU, but where a graph takes less time than its start.
///
/// All work has ended when this returns.
pub fn time_in_turns<M, W: Copy, E: From<Error>>(
    stream: &Stream,
    memory: &mut M,
    works: &[W],
    turns: usize,
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
    // A mark before each graph, and one after the last.
    let turn = || -> Result<Vec<Event>, Error> {
        let mut marks = vec![mark()?];
        for graph in &graphs {
            // SAFETY: the recorded memory is lent to this function, which waits for the end of all work before it gives that back or
            // drops a graph; while work was recorded, the driver let nothing be freed.
            unsafe { graph.launch(stream) }?;
            marks.push(mark()?);
        }
        Ok(marks)
    };
    let queued = (0..=turns).map(|_| turn()).collect::<Result<Vec<_>, Error>>();
    // Even where something could not be queued: what was must end before graphs are dropped and memory is given back.
    stream.synchronize()?;
    let (marks, mut times) = (queued?, vec![Vec::with_capacity(turns); works.len()]);
    for marks in &marks[1..] {
        for (pair, times) in marks.windows(2).zip(&mut times) {
            times.push(pair[1].elapsed_us(&pair[0])?);
        }
    }
    Ok(times)
}
