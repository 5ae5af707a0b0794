package main

// equivalent are random faults that were looked at and found to change nothing that anybody could see, by room and
// the text of the change, with the reason. The runner leaves them out.
var equivalent = map[string]string{}
